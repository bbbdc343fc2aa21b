// What a decode step is given.
#pragma once

#include "decoder.h"
#include "edits.h"

namespace quire {

struct StepEnds {
  const Decoder* decoder;
  const Packed *embedding, *head;
  const float* positions;  // [num_positions, hidden], added to the embeddings; or null
  int64_t num_positions, position_offset;
  float embedding_scale, logit_scale;
  const int64_t* taps;  // layers, ascending, whose inputs a step tells of; or null
  int64_t num_taps;
};

// Of one KV cache group.
struct BlockTable {
  const int32_t* blocks;  // [num_rows, stride]
  int64_t stride;
};

struct StepTables {
  int32_t* tokens;  // [num_rows, token_stride]
  int64_t token_stride;
  const BlockTable* block_tables;  // [num_groups]
  int64_t num_groups;
  const int64_t* num_prompt;           // [num_rows]
  int64_t *num_tokens, *num_computed;  // [num_rows]
  int64_t num_rows;
};

// For each of the step's rows; without temperatures all take the likeliest token.
struct StepChoice {
  const float* temperature;
  const int64_t* top_k;
  const double *top_p, *min_p;
  const uint64_t* seeds;
  const RowEdits* edits;  // null: no row has any
};

// What a step gives.
struct StepResult {
  int64_t* out;  // by token of the rows that it chooses for: the next one, or -1
  int64_t* got;  // by row: how many tokens it got; or null
  float* open;   // by token of the other rows: its logits
  // By token of the rows that it chooses for, as `Told`, where the row's edits ask for it.
  int64_t* ids;  // [tokens, 1 + the most that any is told of]
  float* values;
  int64_t* ranks;
  int64_t most;
  // [tokens of all rows, hidden]: what the head takes; with taps [.., num_taps * hidden], what those
  // layers begin with; or null
  float* hidden;
};

}  // namespace quire
