"""The arithmetic of codecs and sums: compiled by numba, or plain torch with the same bits."""
