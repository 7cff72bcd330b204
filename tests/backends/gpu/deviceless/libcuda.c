/* What cuDNN's libraries look for in the driver, without a driver: enough to plan for a device that is described.
   Nothing can be run with it. */
static int thing;

int cuDriverGetVersion(int *version) { *version = 12090; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "there is no device"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }

int cuLibraryLoadData(void **library) { *library = &thing; return 0; }
int cuLibraryGetKernel(void **kernel) { *kernel = &thing; return 0; }
int cuLibraryUnload(void) { return 0; }
int cuKernelGetFunction(void **function) { *function = &thing; return 0; }
int cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int cuKernelSetAttribute(void) { return 0; }
int cuModuleLoadData(void **module) { *module = &thing; return 0; }
int cuModuleGetFunction(void **function) { *function = &thing; return 0; }
int cuModuleUnload(void) { return 0; }
int cuOccupancyMaxPotentialClusterSize(int *size) { *size = 8; return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }

#define ABSENT(name) int name(void) { return 100; }
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxGetLimit)
ABSENT(cuCtxPopCurrent)
ABSENT(cuCtxPushCurrent)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetCount)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLaunchKernelEx)
ABSENT(cuLibraryLoadFromFile)
ABSENT(cuLinkAddData)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate)
ABSENT(cuLinkDestroy)
ABSENT(cuStreamGetCtx)
