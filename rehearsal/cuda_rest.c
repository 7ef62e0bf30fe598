/* libcuda.so.1: what torch's libraries link and no rehearsal calls. In a file without cuda.h, whose types it need not have. */
#include <stdio.h>

#define NOT_STOOD_IN(name)                                         \
    int name(void)                                                 \
    {                                                              \
        fprintf(stderr, "rehearsed: " #name " has no stand-in\n"); \
        return 801; /* CUDA_ERROR_NOT_SUPPORTED */                 \
    }

NOT_STOOD_IN(cuCtxGetCurrent)
NOT_STOOD_IN(cuCtxSetCurrent)
NOT_STOOD_IN(cuDeviceGet)
NOT_STOOD_IN(cuDeviceGetAttribute)
NOT_STOOD_IN(cuDevicePrimaryCtxRetain)
NOT_STOOD_IN(cuFuncGetAttribute)
NOT_STOOD_IN(cuFuncSetAttribute)
NOT_STOOD_IN(cuFuncSetCacheConfig)
NOT_STOOD_IN(cuLaunchCooperativeKernel)
NOT_STOOD_IN(cuLaunchKernel)
NOT_STOOD_IN(cuLinkAddData_v2)
NOT_STOOD_IN(cuLinkComplete)
NOT_STOOD_IN(cuLinkCreate_v2)
NOT_STOOD_IN(cuModuleGetFunction)
NOT_STOOD_IN(cuModuleLoad)
NOT_STOOD_IN(cuModuleLoadData)
NOT_STOOD_IN(cuModuleLoadDataEx)
NOT_STOOD_IN(cuModuleUnload)
NOT_STOOD_IN(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_STOOD_IN(cuPointerGetAttribute)
NOT_STOOD_IN(cuTensorMapEncodeTiled)
