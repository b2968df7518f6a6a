"""The computation of a window as a plan: which operations run again, on which tensors, and the calls between them. It
needs no torch."""
