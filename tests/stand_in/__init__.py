"""A stand-in for NVIDIA's CUDA and NCCL, on which PyTorch's own CUDA build runs on a machine without a GPU.

`with_gpus 2 python train.py` runs a program with two of them. docs: `README.md` beside this file.
"""
