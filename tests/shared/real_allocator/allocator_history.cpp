// As allocator_statistics.cpp, but prints the history at the end: "e action address size" for each entry of the trace, then
// "b address size used" for each block, then "s" with the statistics.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <cstdio>
#include <vector>
using namespace c10::cuda::CUDACachingAllocator;
using Entry = c10::CachingDeviceAllocator::TraceEntry;
static const char* name(int action){
  switch(action){
    case Entry::ALLOC: return "alloc"; case Entry::FREE_REQUESTED: return "free_requested";
    case Entry::FREE_COMPLETED: return "free_completed"; case Entry::SEGMENT_ALLOC: return "segment_alloc";
    case Entry::SEGMENT_FREE: return "segment_free"; case Entry::SEGMENT_MAP: return "segment_map";
    case Entry::SEGMENT_UNMAP: return "segment_unmap"; case Entry::SNAPSHOT: return "snapshot"; case Entry::OOM: return "oom";
  }
  return "other";
}
int main(){
  c10::cuda::detail::init_p2p_access_cache(1); CUDAAllocatorConfig::set_expandable_segments_handle_type(Expandable_Segments_Handle_Type::POSIX_FD);
  auto* a=get(); a->init(1);
  a->recordHistory(true, nullptr, 1ull<<40, RecordContext::NEVER, false, {});
  std::vector<void*> p; char c; unsigned long long id,n;
  while(scanf(" %c %llu %llu",&c,&id,&n)==3){
    if(p.size()<=id) p.resize(id+1,nullptr);
    if(c=='m'){ try{ p[id]=a->raw_alloc_with_stream(n,nullptr);}catch(const c10::OutOfMemoryError& e){ p[id]=nullptr; } }
    else if(p[id]){ a->raw_delete(p[id]); p[id]=nullptr; }
  }
  auto s=a->getDeviceStats(0);
  auto taken=a->snapshot();
  for(const auto& e: taken.device_traces.at(0)) printf("e %s %zu %zu\n", name(e.action_), e.addr_, e.size_);
  for(const auto& segment: taken.segments){ size_t at=segment.address;
    for(const auto& b: segment.blocks){ printf("b %zu %zu %d\n", at, b.size, int(b.allocated)); at+=b.size; } }
  printf("s %lld %lld %lld %lld %lld\n",(long long)s.allocated_bytes[0].current,(long long)s.allocated_bytes[0].peak,(long long)s.reserved_bytes[0].current,(long long)s.reserved_bytes[0].peak,(long long)s.num_alloc_retries);
}
