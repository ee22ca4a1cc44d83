/* All kernels of one element type as one translation unit. */
#include "rows.c"
#include "routing.c"
#include "matmul.c"
#include "indexer.c"
#include "attention.c"
#ifndef ELEM_BF16 /* logits are float32 in every model */
#include "draw.c"
#endif
