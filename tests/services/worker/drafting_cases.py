"""Requests of every kind that drafts must not change."""

import random

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "seed": 2**63 + 7, "top_p": 0.8},
    {"temperature": 0.8, "seed": 1, "top_k": 7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 9, "min_p": 0.05, "min_tokens": 6, "stop_token_ids": (3, 4)},
    {"temperature": 0.0, "logit_bias": ((3, 5.0), (9, -5.0)), "num_logprobs": 2},
    {"temperature": 0.7, "seed": 4, "repetition_penalty": 0.8, "num_logprobs": 0},
]
PROMPTS = [[random.Random(i).randrange(100) for _ in range(3 + 2 * i)] for i in range(8)]
