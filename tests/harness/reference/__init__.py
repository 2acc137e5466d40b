"""The codecs and the weighted sum in torch's operations: what the compiled kernels must equal."""
