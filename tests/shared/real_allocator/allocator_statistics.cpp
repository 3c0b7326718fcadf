// Drives the allocator of an installed torch by lines "m block bytes stream" or "f block 0 0", and prints its statistics after each.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <cstdio>
#include <vector>
using namespace c10::cuda::CUDACachingAllocator;
int main(){
  c10::cuda::detail::init_p2p_access_cache(1); CUDAAllocatorConfig::set_expandable_segments_handle_type(Expandable_Segments_Handle_Type::POSIX_FD); auto* a=get(); a->init(1);
  std::vector<void*> p; char c; unsigned long long id,n,on; 
  int failed=0;
  while(scanf(" %c %llu %llu %llu",&c,&id,&n,&on)==4){
    if(p.size()<=id) p.resize(id+1,nullptr);
    if(c=='m'){ try{ p[id]=a->raw_alloc_with_stream(n,(cudaStream_t)on);}catch(const c10::OutOfMemoryError& e){ p[id]=nullptr; failed++; } }
    else if(p[id]){ a->raw_delete(p[id]); p[id]=nullptr; }
    auto s=a->getDeviceStats(0);
    printf("%lld %lld %lld %lld %lld %d\n",(long long)s.allocated_bytes[0].current,(long long)s.reserved_bytes[0].current,(long long)s.allocated_bytes[0].peak,(long long)s.reserved_bytes[0].peak,(long long)s.num_alloc_retries,failed);
  }
}
