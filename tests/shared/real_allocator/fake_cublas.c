// libcublas.so.13 and libcublasLt.so.13: a handle of its own for each thread, and a plan for every product.
#include <stdlib.h>
#include <string.h>
int cublasCreate_v2(void** p){ *p=malloc(64); return 0; }
int cublasGetMathMode(void* h, int* m){ *m=0; return 0; }
int cublasGetPointerMode_v2(void* h, int* m){ *m=0; return 0; }
int cublasLtCreate(void** p){ *p=malloc(64); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void* a, void* b, void* c, void* d, void* e, void* f, void* g, int n, void* r, int* got){ memset(r,0,96); *got=1; return 0; }
