"""FP32 masters: the table of masters by parameter, the transfer of values and gradients, clipping."""
