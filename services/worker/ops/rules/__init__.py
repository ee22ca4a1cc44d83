"""What the NPU's kernels demand of each call, by family of operators."""
