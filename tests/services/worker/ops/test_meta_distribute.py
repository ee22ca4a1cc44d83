"""Shapes of the fused exchange in GLM-5.2's sizes, by the formulas of the device's page."""

import torch

from services.worker.ops.meta_distribute import kernels


def test_there_is_room_for_every_token_of_every_rank() -> None:
    x = torch.empty((12, 6144), dtype=torch.bfloat16, device="meta")
    ids = torch.empty((12, 8), dtype=torch.int32, device="meta")
    dispatch = kernels()["npu_moe_distribute_dispatch_v2"]
    found = dispatch(x, ids, "g", 32, 3, 256, quant_mode=2)
    room = 12 * 32 * 8  # min(8 experts here, 8 choices)
    shapes = [tuple(result.shape) for result in found]
    assert shapes == [(room, 6144), (room,), (room * 128,), (8,), (256,), (0,), (0,)]
    types = [result.dtype for result in found]
    assert types[:5] == [torch.int8, torch.float32, torch.int32, torch.int64, torch.int32]
    combine = kernels()["npu_moe_distribute_combine_v2"]
    back = combine(found[0].to(torch.bfloat16), ids, found[2], found[4])
    assert (tuple(back.shape), back.dtype) == ((12, 6144), torch.bfloat16)
