// NCCL's header, without those of CUDA's small floats: they need more headers than the wheels have, and it uses none of
// their types.
#pragma once

#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
