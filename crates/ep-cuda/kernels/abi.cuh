// What the host and the kernels share. The mirror of src/abi.rs, where every field is explained.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct StepHeader { u32 rows, wanted, serial, slot; };
struct StepRow { u32 sequence, position, token, table; };
struct StepRef { const StepHeader* header; const StepRow* rows; const u32* wanted; const u32* pages; };

struct Activation { u8* codes; int2* steps; float* floats; u32 cols, ld; };

struct LinearSegment { const u8* planes[3]; const u8* bias; u32 rows, column, bias_type, accumulate; };

#define MAX_SEGMENTS 8

struct LinearArgs {
    StepRef step;
    Activation x;
    float* out;
    u32 out_ld, wanted, segments, group_shift, flip, scale_half, ahead, reserved;
    LinearSegment segment[MAX_SEGMENTS];
};

struct QuantiseArgs {
    StepRef step;
    Activation out;
    const float* src;
    const u8* weight;
    u32 src_ld, weight_type;
    float eps;
    u32 gather, wanted, codes, floats, reserved;
};

struct EmbedArgs {
    StepRef step;
    const u8* planes[3];
    const u32* feedback;
    float* out;
    u32 cols, vocab, gathered, group_shift, flip, scale_half;
};

struct KvRef { u8* base; u64 page_bytes, key_offset, value_offset; u32 token_stride, head_stride, page_tokens, half; };

struct RopeArgs {
    StepRef step;
    KvRef kv;
    float* qkv;
    const float *cos, *sin;
    const u8 *q_norm, *k_norm;
    u32 q_norm_type, k_norm_type;
    float eps;
    u32 heads, kv_heads, head_dim, dims, interleaved;
};

struct AttentionArgs {
    StepRef step;
    KvRef kv;
    const float* qkv;
    float* out;
    float* partials;
    u32* tickets;
    u32 heads, kv_heads, head_dim, qkv_ld;
    float scale, softcap;
    u32 window, chunks;
};

struct ChainSegment { const u8 *codes, *scales, *bias; u32 rows, column, before, accumulate; };

struct ChainMatrix { float* out; u32 units, first, segment, segments, blocks, flip; };

struct ChainLinear {
    Activation x;
    const float* src;
    const u8* weight;
    float eps;
    u32 kv;
};

struct ChainTask { u32 kind, index; };

struct ChainArgs {
    StepRef step;
    const uint4* table;
    const ChainLinear* linear;
    const AttentionArgs* attention;
    const RopeArgs* rope;
    const QuantiseArgs* activation;
    u32* barrier;
    u32 tasks, linears, segments, table_bytes, area, slots;
};

struct ArgmaxResult { u32 token, bad; };
struct ArgmaxScratch { u64 key; u32 bad, done; };

struct ArgmaxArgs {
    StepRef step;
    const float* logits;
    ArgmaxResult* results;
    u32* feedback;
    ArgmaxScratch* scratch;
    ArgmaxResult* host_results;
    u32* host_flag;
    u32 vocab, max_wanted;
};

struct ProbeArgs { const uint4* source; u64 count; u32* sink; };

static_assert(sizeof(ChainSegment) == 40 && sizeof(ChainMatrix) == 32 && sizeof(ChainLinear) == 56, "abi");
static_assert(sizeof(ChainArgs) == 104 && sizeof(ChainTask) == 8, "abi");
static_assert(sizeof(ProbeArgs) == 24, "abi");
static_assert(sizeof(StepRef) == 32 && sizeof(Activation) == 32 && sizeof(LinearSegment) == 48, "abi");
static_assert(sizeof(LinearArgs) == 104 + 48 * MAX_SEGMENTS && sizeof(QuantiseArgs) == 112, "abi");
static_assert(sizeof(EmbedArgs) == 96 && sizeof(KvRef) == 48 && sizeof(RopeArgs) == 152, "abi");
static_assert(sizeof(AttentionArgs) == 144 && sizeof(ArgmaxArgs) == 88 && sizeof(ArgmaxScratch) == 16, "abi");
