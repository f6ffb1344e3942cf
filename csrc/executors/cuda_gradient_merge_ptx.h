// Kernels as PTX, which the driver compiles: building the extension takes no nvcc. In CUDA C++ (`add` in merge_add):
//
//   for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < packets; i += gridDim.x * blockDim.x)
//     for (int k = 0; k < 4; ++k) grad[4 * i + k] = (add ? grad[4 * i + k] : 0) + float(sum[4 * i + k]);
//
// with the loads of four rounds before the first store. PTX has no loop over registers, so each round is written out. A
// bfloat16 is the upper half of the float32 of its value.
#pragma once

namespace ldc {

inline constexpr const char* kGradientMergePtx = R"ptx(.version 7.0
.target sm_70
.address_size 64

.visible .entry merge_copy(.param .u64 grad, .param .u64 sum, .param .u64 packets)
{
  .reg .pred %here<4>;
  .reg .b32 %threads, %blocks, %block, %thread, %low<4>, %high<4>;
  .reg .f32 %w<4>, %g<16>;
  .reg .b64 %packets, %sum, %grad, %i, %stride, %from, %to<4>;

  ld.param.u64 %grad, [grad];
  ld.param.u64 %sum, [sum];
  ld.param.u64 %packets, [packets];
  cvta.to.global.u64 %grad, %grad;
  cvta.to.global.u64 %sum, %sum;
  mov.u32 %threads, %ntid.x;
  mov.u32 %blocks, %nctaid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %stride, %threads, %blocks;
  mul.wide.u32 %i, %block, %threads;
  cvt.u64.u32 %from, %thread;
  add.u64 %i, %i, %from;
next:
  // loads of round 0
  setp.lt.u64 %here0, %i, %packets;
  shl.b64 %from, %i, 3;
  add.u64 %from, %sum, %from;
  @%here0 ld.global.v2.b32 {%low0, %high0}, [%from];
  shl.b64 %to0, %i, 4;
  add.u64 %to0, %grad, %to0;
  add.u64 %i, %i, %stride;

  // loads of round 1
  setp.lt.u64 %here1, %i, %packets;
  shl.b64 %from, %i, 3;
  add.u64 %from, %sum, %from;
  @%here1 ld.global.v2.b32 {%low1, %high1}, [%from];
  shl.b64 %to1, %i, 4;
  add.u64 %to1, %grad, %to1;
  add.u64 %i, %i, %stride;

  // loads of round 2
  setp.lt.u64 %here2, %i, %packets;
  shl.b64 %from, %i, 3;
  add.u64 %from, %sum, %from;
  @%here2 ld.global.v2.b32 {%low2, %high2}, [%from];
  shl.b64 %to2, %i, 4;
  add.u64 %to2, %grad, %to2;
  add.u64 %i, %i, %stride;

  // loads of round 3
  setp.lt.u64 %here3, %i, %packets;
  shl.b64 %from, %i, 3;
  add.u64 %from, %sum, %from;
  @%here3 ld.global.v2.b32 {%low3, %high3}, [%from];
  shl.b64 %to3, %i, 4;
  add.u64 %to3, %grad, %to3;
  add.u64 %i, %i, %stride;

  // store of round 0
  shl.b32 %w0, %low0, 16;
  and.b32 %w1, %low0, 0xffff0000;
  shl.b32 %w2, %high0, 16;
  and.b32 %w3, %high0, 0xffff0000;
  @%here0 st.global.v4.f32 [%to0], {%w0, %w1, %w2, %w3};

  // store of round 1
  shl.b32 %w0, %low1, 16;
  and.b32 %w1, %low1, 0xffff0000;
  shl.b32 %w2, %high1, 16;
  and.b32 %w3, %high1, 0xffff0000;
  @%here1 st.global.v4.f32 [%to1], {%w0, %w1, %w2, %w3};

  // store of round 2
  shl.b32 %w0, %low2, 16;
  and.b32 %w1, %low2, 0xffff0000;
  shl.b32 %w2, %high2, 16;
  and.b32 %w3, %high2, 0xffff0000;
  @%here2 st.global.v4.f32 [%to2], {%w0, %w1, %w2, %w3};

  // store of round 3
  shl.b32 %w0, %low3, 16;
  and.b32 %w1, %low3, 0xffff0000;
  shl.b32 %w2, %high3, 16;
  and.b32 %w3, %high3, 0xffff0000;
  @%here3 st.global.v4.f32 [%to3], {%w0, %w1, %w2, %w3};

  // next rounds, if this thread has any left
  setp.lt.u64 %here0, %i, %packets;
  @%here0 bra next;
  ret;
}

.visible .entry merge_add(.param .u64 grad, .param .u64 sum, .param .u64 packets)
{
  .reg .pred %here<4>;
  .reg .b32 %threads, %blocks, %block, %thread, %low<4>, %high<4>;
  .reg .f32 %w<4>, %g<16>;
  .reg .b64 %packets, %sum, %grad, %i, %stride, %from, %to<4>;

  ld.param.u64 %grad, [grad];
  ld.param.u64 %sum, [sum];
  ld.param.u64 %packets, [packets];
  cvta.to.global.u64 %grad, %grad;
  cvta.to.global.u64 %sum, %sum;
  mov.u32 %threads, %ntid.x;
  mov.u32 %blocks, %nctaid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %stride, %threads, %blocks;
  mul.wide.u32 %i, %block, %threads;
  cvt.u64.u32 %from, %thread;
  add.u64 %i, %i, %from;
next:
  // loads of round 0
  setp.lt.u64 %here0, %i, %packets;
  shl.b64 %from, %i, 3;
  add.u64 %from, %sum, %from;
  @%here0 ld.global.v2.b32 {%low0, %high0}, [%from];
  shl.b64 %to0, %i, 4;
  add.u64 %to0, %grad, %to0;
  @%here0 ld.global.v4.f32 {%g0, %g1, %g2, %g3}, [%to0];
  add.u64 %i, %i, %stride;

  // loads of round 1
  setp.lt.u64 %here1, %i, %packets;
  shl.b64 %from, %i, 3;
  add.u64 %from, %sum, %from;
  @%here1 ld.global.v2.b32 {%low1, %high1}, [%from];
  shl.b64 %to1, %i, 4;
  add.u64 %to1, %grad, %to1;
  @%here1 ld.global.v4.f32 {%g4, %g5, %g6, %g7}, [%to1];
  add.u64 %i, %i, %stride;

  // loads of round 2
  setp.lt.u64 %here2, %i, %packets;
  shl.b64 %from, %i, 3;
  add.u64 %from, %sum, %from;
  @%here2 ld.global.v2.b32 {%low2, %high2}, [%from];
  shl.b64 %to2, %i, 4;
  add.u64 %to2, %grad, %to2;
  @%here2 ld.global.v4.f32 {%g8, %g9, %g10, %g11}, [%to2];
  add.u64 %i, %i, %stride;

  // loads of round 3
  setp.lt.u64 %here3, %i, %packets;
  shl.b64 %from, %i, 3;
  add.u64 %from, %sum, %from;
  @%here3 ld.global.v2.b32 {%low3, %high3}, [%from];
  shl.b64 %to3, %i, 4;
  add.u64 %to3, %grad, %to3;
  @%here3 ld.global.v4.f32 {%g12, %g13, %g14, %g15}, [%to3];
  add.u64 %i, %i, %stride;

  // sum and store of round 0
  shl.b32 %w0, %low0, 16;
  and.b32 %w1, %low0, 0xffff0000;
  shl.b32 %w2, %high0, 16;
  and.b32 %w3, %high0, 0xffff0000;
  add.rn.f32 %w0, %g0, %w0;
  add.rn.f32 %w1, %g1, %w1;
  add.rn.f32 %w2, %g2, %w2;
  add.rn.f32 %w3, %g3, %w3;
  @%here0 st.global.v4.f32 [%to0], {%w0, %w1, %w2, %w3};

  // sum and store of round 1
  shl.b32 %w0, %low1, 16;
  and.b32 %w1, %low1, 0xffff0000;
  shl.b32 %w2, %high1, 16;
  and.b32 %w3, %high1, 0xffff0000;
  add.rn.f32 %w0, %g4, %w0;
  add.rn.f32 %w1, %g5, %w1;
  add.rn.f32 %w2, %g6, %w2;
  add.rn.f32 %w3, %g7, %w3;
  @%here1 st.global.v4.f32 [%to1], {%w0, %w1, %w2, %w3};

  // sum and store of round 2
  shl.b32 %w0, %low2, 16;
  and.b32 %w1, %low2, 0xffff0000;
  shl.b32 %w2, %high2, 16;
  and.b32 %w3, %high2, 0xffff0000;
  add.rn.f32 %w0, %g8, %w0;
  add.rn.f32 %w1, %g9, %w1;
  add.rn.f32 %w2, %g10, %w2;
  add.rn.f32 %w3, %g11, %w3;
  @%here2 st.global.v4.f32 [%to2], {%w0, %w1, %w2, %w3};

  // sum and store of round 3
  shl.b32 %w0, %low3, 16;
  and.b32 %w1, %low3, 0xffff0000;
  shl.b32 %w2, %high3, 16;
  and.b32 %w3, %high3, 0xffff0000;
  add.rn.f32 %w0, %g12, %w0;
  add.rn.f32 %w1, %g13, %w1;
  add.rn.f32 %w2, %g14, %w2;
  add.rn.f32 %w3, %g15, %w3;
  @%here3 st.global.v4.f32 [%to3], {%w0, %w1, %w2, %w3};

  // next rounds, if this thread has any left
  setp.lt.u64 %here0, %i, %packets;
  @%here0 bra next;
  ret;
}
)ptx";

}  // namespace ldc
