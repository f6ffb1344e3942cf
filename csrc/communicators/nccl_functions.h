// NCCL's functions, which are looked up when they are called.
#pragma once

#include <nccl.h>

#include "base/late.h"

// Gathers by copy engines, into memory that is registered in windows.
#define LDC_WITH_WINDOWS (NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0))
// Ranks that meet at several of them, and not all at the first one.
#define LDC_WITH_SEVERAL_IDS (NCCL_VERSION_CODE >= NCCL_VERSION(2, 23, 0))

namespace ldc {

LDC_LATE(ncclAllGather)
LDC_LATE(ncclAllReduce)
LDC_LATE(ncclCommAbort)
LDC_LATE(ncclCommDestroy)
LDC_LATE(ncclCommFinalize)
LDC_LATE(ncclCommGetAsyncError)
LDC_LATE(ncclCommInitRankConfig)
LDC_LATE(ncclCommSplit)
LDC_LATE(ncclGetErrorString)
LDC_LATE(ncclGetLastError)
LDC_LATE(ncclGetUniqueId)
LDC_LATE(ncclGetVersion)
LDC_LATE(ncclGroupEnd)
LDC_LATE(ncclGroupStart)
LDC_LATE(ncclMemAlloc)
LDC_LATE(ncclMemFree)
LDC_LATE(ncclReduceScatter)
#if LDC_WITH_SEVERAL_IDS
LDC_LATE(ncclCommInitRankScalable)
#endif
#if LDC_WITH_WINDOWS
LDC_LATE(ncclCommWindowDeregister)
LDC_LATE(ncclCommWindowRegister)
#endif

}  // namespace ldc
