"""Storage formats for FP32 values other than FP32 tensors: split and stochastic masters, 8-bit optimizer state."""
