/* All kernels of one element type as one translation unit. */
#include "rows.c"
#include "move.c"
#include "routing.c"
#include "routing_int8.c"
#include "matmul.c"
#include "experts_int8.c"
#include "int8.c"
#include "indexer.c"
#include "attention.c"
#include "attention_quant.c"
#include "cache_quant.c"
#ifndef ELEM_BF16 /* the same for every element type: logits are float32, keys int8 */
#include "indexer_quant.c"
#include "draw.c"
#include "largest.c"
#include "allow_only.c"
#endif
