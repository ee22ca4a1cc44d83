from services.worker.sizing.hardware import GIB, HARDWARE


def test_devices_have_less_than_their_nominal_memory() -> None:
    for name in ("a2", "a3"):
        hardware = HARDWARE[name]
        assert hardware.is_npu
        # 64 GB are 59.6 GiB as makers count and 64 GiB as chips do; firmware keeps a part.
        assert 59.6 * GIB < hardware.memory_bytes < 64 * GIB


def test_nodes_have_the_guides_number_of_devices() -> None:
    assert HARDWARE["a2"].devices_per_node == 8
    assert HARDWARE["a3"].devices_per_node == 16


def test_a_cpu_has_no_device_memory() -> None:
    assert not HARDWARE["cpu"].is_npu
