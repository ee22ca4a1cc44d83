import torch

from services.worker.staging import StagingBuffer, StepStaging
from tests.services.worker.plans import make_capacity

CPU = torch.device("cpu")


def test_on_a_cpu_host_and_device_are_one_memory() -> None:
    buffer = StagingBuffer((5,), torch.int64, CPU)
    buffer.array[:3] = [4, 5, 6]
    sent = buffer.send(3)
    buffer.array[0] = 9
    assert sent.tolist() == [9, 5, 6]


def test_addresses_stay_whatever_part_is_sent() -> None:
    buffer = StagingBuffer((5,), torch.int32, CPU)
    assert buffer.send(2).data_ptr() == buffer.send(4).data_ptr()
    assert buffer.send(4) is buffer.send(4)


def test_another_device_gets_its_own_memory() -> None:
    buffer = StagingBuffer((5,), torch.int32, torch.device("meta"))
    sent = buffer.send(2)
    assert (sent.device.type, tuple(sent.shape)) == ("meta", (2,))


def test_tables_reach_past_the_longest_sequence_by_its_drafts() -> None:
    limits = make_capacity(block_size=4, max_model_len=39, num_speculative_tokens=3)
    staging = StepStaging(limits, 10, 2, CPU)
    assert staging.max_blocks == 11
    assert staging.tables.array.shape == (22,)
    assert staging.token_ids.array.shape == (10,)
    assert staging.seq_lens.array.shape == (2,)
