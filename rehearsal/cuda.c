/* libcuda.so.1: the few functions of the driver that torch's libraries link. Only the state of a device's context is answered. */
#include <cuda.h>

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active)
{
    *flags = 0, *is_active = 1;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error == CUDA_SUCCESS ? "no error" : "rehearsed: an error of the driver";
    return CUDA_SUCCESS;
}
