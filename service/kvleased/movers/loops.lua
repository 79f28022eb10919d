-- The loops of `compiled.py`, which says what they are given: addresses of arrays, and how long these are.

local memcpy_address, xxh3_addresses, chunk_bytes = ...

local ffi = require("ffi")
ffi.cdef [[
  typedef struct { int64_t source, source_stride, target, target_stride, num_bytes, is_summed; } part_t;
]]

local memcpy = ffi.cast("void *(*)(void *, const void *, size_t)", memcpy_address)
local sum_of = ffi.cast("uint64_t (*)(const void *, size_t)", xxh3_addresses.XXH3_64bits)
local new = ffi.cast("void *(*)(void)", xxh3_addresses.XXH3_createState)
local reset = ffi.cast("int (*)(void *)", xxh3_addresses.XXH3_64bits_reset)
local update = ffi.cast("int (*)(void *, const void *, size_t)", xxh3_addresses.XXH3_64bits_update)
local digest = ffi.cast("uint64_t (*)(const void *)", xxh3_addresses.XXH3_64bits_digest)

local summing = new()

local function ends_of(part)
  return ffi.cast("const char *", part.source), tonumber(part.source_stride),
    ffi.cast("char *", part.target), tonumber(part.target_stride), tonumber(part.num_bytes)
end

local function ids_at(address)
  return ffi.cast("const int32_t *", address)
end

local function sums_at(address)
  return ffi.cast("uint64_t *", address)
end

local function copy(parts, num_parts, sources, targets, counts, num_runs)
  parts = ffi.cast("const part_t *", parts)
  sources, targets, counts = ids_at(sources), ids_at(targets), ids_at(counts)
  for run = 0, num_runs - 1 do
    for number = 0, num_parts - 1 do
      local source, source_stride, target, target_stride, num_bytes = ends_of(parts[number])
      source, target = source + sources[run] * source_stride, target + targets[run] * target_stride
      if source_stride == num_bytes and target_stride == num_bytes then
        memcpy(target, source, counts[run] * num_bytes)
      else
        for block = 0, counts[run] - 1 do
          memcpy(target + block * target_stride, source + block * source_stride, num_bytes)
        end
      end
    end
  end
end

-- Copy blocks of one part, which lie one behind the other at both ends, and sum each while its source is in the cache.
local function copy_and_sum_rows(part, sources, targets, counts, num_runs, sums)
  local from, _, to, _, num_bytes = ends_of(part)
  local num_summed = 0
  for run = 0, num_runs - 1 do
    local source = from + sources[run] * num_bytes
    memcpy(to + targets[run] * num_bytes, source, counts[run] * num_bytes)
    for block = 0, counts[run] - 1 do
      sums[num_summed] = sum_of(source + block * num_bytes, num_bytes)
      num_summed = num_summed + 1
    end
  end
end

-- Copy one block, and return its sum. Of a large part, a chunk is summed before the next one drives it from the cache.
local function copy_and_sum_block(parts, num_parts, source_id, target_id)
  reset(summing)
  for number = 0, num_parts - 1 do
    local source, source_stride, target, target_stride, num_bytes = ends_of(parts[number])
    local is_summed = parts[number].is_summed ~= 0
    source, target = source + source_id * source_stride, target + target_id * target_stride
    for start = 0, num_bytes - 1, chunk_bytes do
      local length = math.min(chunk_bytes, num_bytes - start)
      memcpy(target + start, source + start, length)
      if is_summed then update(summing, source + start, length) end
    end
  end
  return digest(summing)
end

local function copy_and_sum(parts, num_parts, sources, targets, counts, num_runs, sums)
  parts, sums = ffi.cast("const part_t *", parts), sums_at(sums)
  sources, targets, counts = ids_at(sources), ids_at(targets), ids_at(counts)
  if num_parts == 1 and parts[0].is_summed ~= 0 then
    local _, source_stride, _, target_stride, num_bytes = ends_of(parts[0])
    if source_stride == num_bytes and target_stride == num_bytes and num_bytes <= chunk_bytes then
      return copy_and_sum_rows(parts[0], sources, targets, counts, num_runs, sums)
    end
  end
  local num_summed = 0
  for run = 0, num_runs - 1 do
    for block = 0, counts[run] - 1 do
      sums[num_summed] = copy_and_sum_block(parts, num_parts, sources[run] + block, targets[run] + block)
      num_summed = num_summed + 1
    end
  end
end

local function sum(rows, stride, num_bytes, ids, num_ids, sums)
  rows, ids, sums = ffi.cast("const char *", rows), ids_at(ids), sums_at(sums)
  for number = 0, num_ids - 1 do
    sums[number] = sum_of(rows + ids[number] * stride, num_bytes)
  end
end

return copy, copy_and_sum, sum
