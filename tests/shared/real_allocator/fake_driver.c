// libcuda.so.1: PyTorch only asks whether there is a context.
int cuInit(unsigned flags){ return 0; }
int cuCtxGetCurrent(void** c){ *c=(void*)8; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned* f, int* active){ if(f) *f=0; *active=1; return 0; }
int cuDriverGetVersion(int* v){ *v=13000; return 0; }
int cuDeviceGetCount(int* v){ *v=1; return 0; }
int cuDeviceGet(int* v, int d){ *v=0; return 0; }
