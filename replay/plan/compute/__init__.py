"""The computation of a window as a plan: which operations run again, on which tensors, and where communication stands
between them. Nothing here needs torch."""
