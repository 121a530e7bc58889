/* Products of a few tokens with a weight matrix: y (tokens, out) = x (tokens, in) * w (out, in)^T + bias.

   Each token is quantized to int8 by blocks of 32, each with a scale, so that products are integers. (One scale for the
   whole token would be faster by a quarter, but its outliers cost several percent of perplexity.) Both stores of the
   weight (int8 rows, 4-bit groups) share one shape of loop: a tile of ROWS weight rows times TOKENS tokens is accumulated
   along `in`, eight lanes at a time, and the lanes are summed at the end. What a tile element computes does not depend
   on the tile it is in, so a token's result has the same bits in any company. The same in PyTorch is in kernels.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 8
#define ROWS 4
#define TOKENS 3
#define BLOCK 32          /* inputs taken at a time; int4 groups are multiples of it */
#define TOKENS_AT_ONCE 48 /* tokens that stay in the second-level cache while the weights pass */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));

#define UNROLL _Pragma("GCC unroll 4")
#define INLINE static inline __attribute__((always_inline))

/* a * b + c, rounded once or twice but in every tile alike. */
INLINE vec add_product(vec c, vec a, vec b) {
#ifdef __FMA__
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return c + a * b;
#endif
}

INLINE float sum(vec v) {
  float halves[4];
  for (int i = 0; i < 4; i++) halves[i] = v[i] + v[i + 4];
  return (halves[0] + halves[2]) + (halves[1] + halves[3]);
}

typedef struct {
  long tokens, in, out, group;
  const void *w;
  const float *scale;     /* int8: per row */
  const uint16_t *scale4; /* int4: float16 per group */
  const uint16_t *offset4;
  const float *bias;
  float *y;
  const int8_t *xq;  /* the tokens, quantized */
  const float *xs;   /* (tokens, in / BLOCK): scale of each block */
  const float *xsum; /* (tokens, in / BLOCK): scale times the sum of the block's integers */
} product;

INLINE void store(const product *p, long row, long token, float value) {
  p->y[token * p->out + row] = p->bias ? value + p->bias[row] : value;
}

#ifdef __AVX2__
/* Products of 32 unsigned with 32 signed bytes, summed by fours. No pair may pass 32767. */
INLINE ivec dot_unsigned(__m256i u, __m256i s) {
  return (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
}
INLINE __m256i load(const void *bytes) { return _mm256_loadu_si256((const __m256i *)bytes); }
INLINE ivec dot_int8(const int8_t *w, const int8_t *x) {
  __m256i a = load(w), b = load(x);
  return dot_unsigned(_mm256_sign_epi8(a, a), _mm256_sign_epi8(b, a));
}
/* 16 bytes hold 32 weights: the low halves are the first 16. */
INLINE ivec dot_int4(const uint8_t *w, const int8_t *x) {
  __m128i bytes = _mm_loadu_si128((const __m128i *)w);
  __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
  return dot_unsigned(_mm256_and_si256(both, _mm256_set1_epi8(15)), load(x));
}
#else
INLINE ivec dot_int8(const int8_t *w, const int8_t *x) {
  ivec lanes;
  for (int l = 0; l < LANES; l++) {
    lanes[l] = 0;
    for (int i = 4 * l; i < 4 * l + 4; i++) lanes[l] += w[i] * x[i];
  }
  return lanes;
}
INLINE ivec dot_int4(const uint8_t *w, const int8_t *x) {
  int8_t q[BLOCK];
  for (int i = 0; i < BLOCK / 2; i++) q[i] = w[i] & 15, q[i + BLOCK / 2] = w[i] >> 4;
  return dot_int8(q, x);
}
#endif

INLINE void tile_int8(const product *p, long row, long token, int rows, int tokens) {
  const int8_t *w = (const int8_t *)p->w + row * p->in, *x = p->xq + token * p->in;
  long blocks = p->in / BLOCK;
  const float *xs = p->xs + token * blocks;
  vec acc[ROWS][TOKENS];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int t = 0; t < tokens; t++) acc[r][t] = (vec){0};
  for (long b = 0; b < blocks; b++)
    UNROLL for (int t = 0; t < tokens; t++) {
      vec scale = (vec){0} + xs[t * blocks + b];
      UNROLL for (int r = 0; r < rows; r++) {
        ivec dot = dot_int8(w + r * p->in + b * BLOCK, x + t * p->in + b * BLOCK);
        acc[r][t] = add_product(acc[r][t], __builtin_convertvector(dot, vec), scale);
      }
    }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int t = 0; t < tokens; t++) store(p, row + r, token + t, sum(acc[r][t]) * p->scale[row + r]);
}

INLINE float half(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, sizeof value);
  return (float)value;
}

INLINE void tile_int4(const product *p, long row, long token, int rows, int tokens) {
  const uint8_t *w = (const uint8_t *)p->w + row * p->in / 2;
  const int8_t *x = p->xq + token * p->in;
  long blocks = p->in / BLOCK, groups = p->in / p->group, per_group = p->group / BLOCK;
  const float *xs = p->xs + token * blocks, *xsum = p->xsum + token * blocks;
  vec acc[ROWS][TOKENS];
  float offsets[ROWS][TOKENS];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int t = 0; t < tokens; t++) acc[r][t] = (vec){0}, offsets[r][t] = 0;
  for (long b = 0; b < blocks; b++)
    UNROLL for (int r = 0; r < rows; r++) {
      long g = (row + r) * groups + b / per_group;
      float scale = half(p->scale4[g]), offset = half(p->offset4[g]);
      UNROLL for (int t = 0; t < tokens; t++) {
        ivec dot = dot_int4(w + r * p->in / 2 + b * BLOCK / 2, x + t * p->in + b * BLOCK);
        acc[r][t] = add_product(acc[r][t], __builtin_convertvector(dot, vec), (vec){0} + scale * xs[t * blocks + b]);
        offsets[r][t] = fmaf(offset, xsum[t * blocks + b], offsets[r][t]);
      }
    }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int t = 0; t < tokens; t++)
      store(p, row + r, token + t, sum(acc[r][t]) + offsets[r][t]);
}

/* The same loop over tiles for each store; `rows` and `tokens` are constants where it matters. */
#define PRODUCT(tile)                                                                       \
  static void all_##tile(const product *p) {                                                \
    long strips = (p->out + ROWS - 1) / ROWS;                                               \
    for (long from = 0; from < p->tokens; from += TOKENS_AT_ONCE) {                         \
      long to = from + TOKENS_AT_ONCE < p->tokens ? from + TOKENS_AT_ONCE : p->tokens;      \
      _Pragma("omp parallel for schedule(static)") for (long s = 0; s < strips; s++) {      \
        long row = s * ROWS, token = from;                                                  \
        if (row + ROWS <= p->out) {                                                         \
          for (; token + TOKENS <= to; token += TOKENS) tile(p, row, token, ROWS, TOKENS);  \
          if (to - token == 2) tile(p, row, token, ROWS, 2);                                \
          if (to - token == 1) tile(p, row, token, ROWS, 1);                                \
        } else                                                                              \
          for (; row < p->out; row++)                                                       \
            for (token = from; token < to; token++) tile(p, row, token, 1, 1);              \
      }                                                                                     \
    }                                                                                       \
  }
PRODUCT(tile_int8)
PRODUCT(tile_int4)

/* One block: scale to -127..127, round to nearest even as torch does. */
INLINE void quantize_block(const float *x, int8_t *q, float *scale, float *scaled_sum) {
  float most = 0;
  for (int i = 0; i < BLOCK; i++) most = fmaxf(most, fabsf(x[i]));
  float inverse = most > 0 ? 127 / most : 0;
  int total = 0;
  for (int i = 0; i < BLOCK; i++) {
    q[i] = (int8_t)rintf(x[i] * inverse);
    total += q[i];
  }
  *scale = most / 127;
  *scaled_sum = *scale * total;
}

static void quantize(long tokens, long in, const float *x, int8_t *xq, float *xs, float *xsum) {
  long blocks = tokens * in / BLOCK;
#pragma omp parallel for schedule(static) if (blocks > 256)
  for (long b = 0; b < blocks; b++) quantize_block(x + b * BLOCK, xq + b * BLOCK, xs + b, xsum + b);
}

/* `in` must be a multiple of BLOCK; xq (tokens, in), xs and xsum (tokens, in / BLOCK) are scratch. */
void linear_int8(long tokens, long in, long out, const float *x, const int8_t *w, const float *scale,
                 const float *bias, float *y, int8_t *xq, float *xs, float *xsum) {
  quantize(tokens, in, x, xq, xs, xsum);
  product p = {.tokens = tokens, .in = in, .out = out, .w = w, .scale = scale,
               .bias = bias, .y = y, .xq = xq, .xs = xs, .xsum = xsum};
  all_tile_int8(&p);
}

/* `group` must be a multiple of BLOCK. */
void linear_int4(long tokens, long in, long out, long group, const float *x, const uint8_t *w, const uint16_t *scale,
                 const uint16_t *offset, const float *bias, float *y, int8_t *xq, float *xs, float *xsum) {
  quantize(tokens, in, x, xq, xs, xsum);
  product p = {.tokens = tokens, .in = in, .out = out, .group = group, .w = w, .scale4 = scale,
               .offset4 = offset, .bias = bias, .y = y, .xq = xq, .xs = xs, .xsum = xsum};
  all_tile_int4(&p);
}
