// Functions marked HETREC_HD compile for the host and, under nvcc, for the device: one text decides on both.
#pragma once

#if defined(__CUDACC__)
#define HETREC_HD __host__ __device__ __forceinline__
#else
#define HETREC_HD inline
#endif
