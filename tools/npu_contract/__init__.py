"""The contract test: the model and our kernels against the real torch_npu wheel, without an NPU.

``make test-npu-contract`` makes an environment of its own (`environment`), gives the wheel the CANN
libraries it links to as stubs (`stubs`), and runs `tests/npu_contract` and the numeric tests of
our kernels in it (`__main__`, `plugin`).
"""
