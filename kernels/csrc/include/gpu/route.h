// Routing on a GPU: a stable counting sort of the slots by expert, in pieces of kPiece slots.
//
// One work-item counts the slots of one expert in one piece and assigns their rows. All work-items
// of a piece read the same slots, so the hardware broadcasts each load. Each work-item has a
// separate counter, so the order of slots is kept without atomics, and the result does not depend
// on the grid.
//
// counts [E, pieces] is stored in the scratch memory of optimus_route.

#pragma once

#include "kernels.h"

namespace optimus {

constexpr int64_t kPiece = 512;

OPTIMUS_FN int64_t route_pieces(int64_t slots) { return (slots + kPiece - 1) / kPiece; }

// Sets counts[e, piece] to the number of slots of the piece that chose expert e.
struct RouteCount {
  const int64_t* chosen;
  int64_t slots, first_expert, num_experts;
  int32_t* counts;

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    const int64_t pieces = route_pieces(slots);
    for (int64_t i = item.item(); i < pieces * num_experts; i += item.items()) {
      const int64_t e = i % num_experts, piece = i / num_experts;
      const int64_t end = (piece + 1) * kPiece < slots ? (piece + 1) * kPiece : slots;
      int32_t count = 0;
      for (int64_t slot = piece * kPiece; slot < end; ++slot)
        count += chosen[slot] - first_expert == e;
      counts[e * pieces + piece] = count;
    }
  }
};

// Replaces counts[e, piece] by the number of slots of expert e in earlier pieces, and sets offsets.
// Runs in one work-group.
struct RouteScan {
  int64_t slots, num_experts;
  int32_t* counts;
  int32_t* offsets;

  // Replaces line[i] by the sum of line[0] to line[i] if `inclusive`, otherwise by the sum of
  // line[0] to line[i - 1]. Returns the sum of all elements.
  template <class Item>
  OPTIMUS_KERNEL static int32_t scan(const Item& item, int64_t size, bool inclusive,
                                     int32_t* line) {
    int32_t before = 0;
    for (int64_t begin = 0; begin < size; begin += item.lanes()) {
      const int64_t i = begin + item.lane();
      const int32_t value = i < size ? line[i] : 0;
      const int32_t upto = item.scan(value);
      if (i < size) line[i] = before + upto - (inclusive ? 0 : value);
      before += item.sum(value);
    }
    return before;
  }

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    const int64_t pieces = route_pieces(slots);
    for (int64_t e = item.team_in_group(); e < num_experts; e += item.teams_in_group()) {
      const int32_t total = scan(item, pieces, false, counts + e * pieces);
      if (item.lane() == 0) offsets[e + 1] = total;
    }
    item.barrier();
    if (item.team_in_group() != 0) return;
    if (item.lane() == 0) offsets[0] = 0;
    scan(item, num_experts, true, offsets + 1);
  }
};

// Assigns rows to slots; slots without a row and rows without a slot get -1.
struct RouteScatter {
  const int64_t* chosen;
  int64_t slots, top_k, first_expert, num_experts;
  const int32_t* counts;
  const int32_t* offsets;
  int32_t* row_token;
  int32_t* row_slot;
  int32_t* slot_row;

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    const int64_t pieces = route_pieces(slots);
    for (int64_t i = item.item(); i < pieces * num_experts; i += item.items())
      assign(i % num_experts, i / num_experts, pieces);
    const int64_t rows = offsets[num_experts];
    for (int64_t i = item.item(); i < slots; i += item.items()) {
      if (local_expert(chosen[i], first_expert, num_experts) < 0) slot_row[i] = -1;
      if (i >= rows) row_token[i] = row_slot[i] = -1;
    }
  }

  OPTIMUS_KERNEL void assign(int64_t e, int64_t piece, int64_t pieces) const {
    const int64_t end = (piece + 1) * kPiece < slots ? (piece + 1) * kPiece : slots;
    int32_t row = offsets[e] + counts[e * pieces + piece];
    for (int64_t slot = piece * kPiece; slot < end; ++slot) {
      if (chosen[slot] - first_expert != e) continue;
      slot_row[slot] = row;
      row_token[row] = static_cast<int32_t>(slot / top_k);
      row_slot[row] = static_cast<int32_t>(slot);
      ++row;
    }
  }
};

}  // namespace optimus
