// A card for PyTorch as a whole, whose kernels end at once and compute nothing: the requests of its own code to the
// allocator are real, the numbers are not. cuBLAS computes nothing either; cuDNN finds no card and fails.
#include "fake_cuda_runtime.cpp"
extern "C" {
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int){ cudaDeviceProp p; cudaGetDeviceProperties(&p,0);
  switch((int)a){ case cudaDevAttrMaxThreadsPerBlock: *v=p.maxThreadsPerBlock; break; case cudaDevAttrMultiProcessorCount: *v=p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *v=p.major; break; case cudaDevAttrComputeCapabilityMinor: *v=p.minor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v=p.maxThreadsPerMultiProcessor; break; case cudaDevAttrWarpSize: *v=p.warpSize; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v=p.sharedMemPerBlock; break; case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v=p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v=p.sharedMemPerMultiprocessor; break; case cudaDevAttrMaxGridDimX: *v=p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v=p.maxGridSize[1]; break; default: *v=0; } return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a,const void*){ memset(a,0,sizeof *a); a->maxThreadsPerBlock=1024; a->ptxVersion=a->binaryVersion=env("STUB_CAPABILITY",80); a->numRegs=32; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n,const void*,int,size_t){ *n=2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n,const void*,int,size_t,unsigned){ *n=2; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v){ *v=13000; return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* d,const void*,size_t n,cudaMemcpyKind k,cudaStream_t){ if(k==cudaMemcpyDeviceToHost) memset(d,0,n); return cudaSuccess; }
cudaError_t cudaHostAlloc(void** p,size_t n,unsigned){ *p=malloc(n); return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** p,void* h,unsigned){ *p=h; return cudaSuccess; }
static int one;
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e,unsigned){ *e=(cudaEvent_t)&one; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* e,unsigned,int){ *e=(cudaStream_t)&one; return cudaSuccess; }
void** __cudaRegisterFatBinary(void*){ static void* h; return &h; }
}
