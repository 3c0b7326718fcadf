// A CUDA runtime and driver without a card: memory is counted, not allocated: STUB_CAP bytes of STUB_TOTAL.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <cstdio>
static size_t env(const char* n, size_t d){ const char* v=getenv(n); return v? strtoull(v,0,10):d; }
static size_t CAP=env("STUB_CAP", 1ull<<60), TOTAL=env("STUB_TOTAL", 1ull<<40), USED=0, NEXT=1ull<<40;
static std::map<size_t,size_t> live, ranges; static std::map<size_t,size_t> handles; static size_t nh=1; static cudaError_t last=cudaSuccess;
// Addresses as autoaccum/simulation/allocator/addresses.py describes them: `ranges` from start to end, of whole 32 MiB.
static size_t add_range(size_t n){ n=(n+(32<<20)-1)>>25<<25; size_t top=1ull<<60;
  for(auto r=ranges.rbegin(); r!=ranges.rend() && top-r->second<=n; ++r) top=r->first;
  ranges[top-n]=top; return top-n; }
static size_t place(size_t n){
  for(auto [start,end]: ranges){ size_t at=start;
    for(auto s=live.lower_bound(start); s!=live.end() && s->first<end && s->first-at<n; ++s) at=s->first+s->second;
    auto next=live.lower_bound(at); size_t to=next!=live.end()&&next->first<end? next->first: end; if(to-at>=n) return at; }
  return add_range(n); }
extern "C" {
cudaError_t cudaMalloc(void** p, size_t n){ if(USED+n>CAP){ last=cudaErrorMemoryAllocation; return last;} USED+=n; size_t a=place(n); *p=(void*)a; live[a]=n; return cudaSuccess; }
cudaError_t cudaFree(void* p){ if(!p) return cudaSuccess; size_t a=(size_t)p; USED-=live.at(a); live.erase(a);
  auto r=std::prev(ranges.upper_bound(a)); auto rest=live.lower_bound(r->first); if(rest==live.end()||rest->first>=r->second) ranges.erase(r); return cudaSuccess; }
cudaError_t cudaGetLastError(){ auto e=last; last=cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError(){ return last; }
cudaError_t cudaGetDeviceCount(int* n){ *n=1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* d){ *d=0; return cudaSuccess; }
cudaError_t cudaSetDevice(int){ return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v){ *v=13020; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p,int){ memset(p,0,sizeof *p); p->totalGlobalMem=TOTAL; size_t cc=env("STUB_CAPABILITY",80); p->major=cc/10; p->minor=cc%10;
  p->multiProcessorCount=env("STUB_PROCESSORS",108); p->maxThreadsPerMultiProcessor=env("STUB_THREADS",2048); p->maxThreadsPerBlock=1024; p->warpSize=32;
  p->sharedMemPerBlock=48<<10; p->sharedMemPerBlockOptin=env("STUB_SHARED_KIB",163)<<10; p->sharedMemPerMultiprocessor=(env("STUB_SHARED_KIB",163)+1)<<10; p->regsPerBlock=p->regsPerMultiprocessor=65536;
  p->maxGridSize[0]=2147483647; p->maxGridSize[1]=p->maxGridSize[2]=65535; p->maxThreadsDim[0]=p->maxThreadsDim[1]=1024; p->maxThreadsDim[2]=64; p->l2CacheSize=40<<20;
  strcpy(p->name,"fake card"); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* f,size_t* t){ *f=CAP>USED?CAP-USED:0; *t=TOTAL; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s){ *s=cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*){ return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int*a,int*b){ *a=0;*b=0; return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t){ return "stub"; }
const char* cudaGetErrorName(cudaError_t){ return "stub"; }
cudaError_t cudaDeviceCanAccessPeer(int* r,int,int){ *r=0; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(){ return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t){ return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t){ return cudaSuccess; }
static CUresult any(){ return CUDA_SUCCESS; }
static CUresult reserve(CUdeviceptr* p,size_t n,size_t,CUdeviceptr,unsigned long long){ size_t a=20ull<<20; a*=12*11*8; NEXT=(NEXT+a-1)/a*a; *p=NEXT; NEXT+=n; return CUDA_SUCCESS; }
static CUresult create(CUmemGenericAllocationHandle* h,size_t n,const CUmemAllocationProp*,unsigned long long){ if(USED+n>CAP) return CUDA_ERROR_OUT_OF_MEMORY; USED+=n; *h=nh; handles[nh++]=n; return CUDA_SUCCESS; }
static CUresult release(CUmemGenericAllocationHandle h){ USED-=handles.at(h); handles.erase(h); return CUDA_SUCCESS; }
static CUresult attr(int* v,CUdevice_attribute,CUdevice){ *v=0; return CUDA_SUCCESS; }
static void* find(const char* s){
  if(!strcmp(s,"cuMemAddressReserve")) return (void*)reserve;
  if(!strcmp(s,"cuMemCreate")) return (void*)create;
  if(!strcmp(s,"cuMemRelease")) return (void*)release;
  if(!strcmp(s,"cuDeviceGetAttribute")) return (void*)attr;
  return (void*)any; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* s, void** f, unsigned int, unsigned long long, cudaDriverEntryPointQueryResult* r){ *f=find(s); if(r)*r=cudaDriverEntryPointSuccess; return cudaSuccess; }
}
