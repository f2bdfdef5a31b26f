"""How long a request may become, and whether a scheduler can take it at all."""

from __future__ import annotations

from cellar.core.errors import CapacityError, RequestError
from cellar.core.messages import Request


def limit_of(request: Request, max_model_len: int, chunk_size: int, num_chunks: int) -> int:
    """Longest that prompt and output may become, in tokens.

    Raises RequestError for a prompt that is empty or leaves no room for a token; CapacityError if prompt and max_tokens
    need more than `num_chunks`.
    """
    count, room = len(request.prompt), 0 if request.params.pooling is not None else 1
    if count == 0:
        raise RequestError("The prompt is empty; it must have at least one token.", "prompt")
    if count + room > max_model_len:
        raise RequestError(
            f"The prompt has {count} tokens, but prompt and output together may have {max_model_len}; "
            f"shorten it to {max_model_len - room} tokens or raise max_model_len.",
            "prompt",
        )
    limit = min(count + request.max_tokens, max_model_len)
    if request.output is not None and count + len(request.output) >= limit:
        raise RequestError(
            f"The request has {len(request.output)} output tokens already and may have {limit - count}; it has ended."
        )
    needed = chunks_of(count, limit, chunk_size)
    if needed > num_chunks:
        raise CapacityError(
            f"A prompt of {count} tokens with max_tokens {request.max_tokens} needs {needed} chunks of KV cache, "
            f"but there are {num_chunks}; shorten the prompt, lower max_tokens or raise kv_cache_memory_bytes."
        )
    return limit


def chunks_of(count: int, limit: int, chunk_size: int) -> int:
    """What a request of `count` known tokens needs if it gets as long as it may: its last token needs no KV."""
    return -(-max(limit - 1, count) // chunk_size)
