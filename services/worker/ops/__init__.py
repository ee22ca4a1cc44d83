"""The device operator set: ``torch.ops.npu.*`` on any device.

On an NPU torch_npu provides the operators. On a CPU `register` provides our kernels under the
same names and schemas, so the model has one code path and CI runs the lines that drive the NPU.
"""

from services.worker.ops.registry import register, set_num_threads

__all__ = ["register", "set_num_threads"]
