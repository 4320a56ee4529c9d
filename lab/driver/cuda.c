/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * SIMULATION. libcuda.so.1 of the kubegpu.share lab: enough for the container toolkit to find and mount, and for a program to ask for
 * CUDA's version. There is no device to compute on, and it says so.
 */
#ifndef CUDA_VERSION
#error "compile with -DCUDA_VERSION=<number>, 13000 for 13.0"
#endif

#define API __attribute__((visibility("default")))

enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NO_DEVICE = 100 };

API int cuInit(unsigned flags)
{
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NO_DEVICE;
}

API int cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}
