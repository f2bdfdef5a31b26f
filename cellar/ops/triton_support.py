"""Triton, imported when the first kernel runs and never before: the CPU path works where it is not installed.

A kernel is a function under `@kernel`, in a module that says

    if TYPE_CHECKING:
        import triton.language as tl

and is launched as `my_kernel[grid](...)`. CUDA tensors run it compiled, CPU tensors in Triton's interpreter (tests). On
meta tensors it computes nothing, as torch's own operations: so `compile_jobs.py` lists what has to be compiled.
Traps of the interpreter: bf16 arithmetic is garbage, so load and convert to float32, and pass `tl.dot` upcast
operands where `interpreted(x)` is true; mask with a large negative number, not -inf; no waiting for other programs.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import types
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cellar.core.errors import DeviceError
from cellar.ops.triton_launches import Launches
from cellar.ops.triton_modules import keep_apart


def triton_available() -> bool:
    """True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def interpreted(x: Tensor) -> bool:
    """True if a kernel that is given `x` runs in the interpreter."""
    return x.is_cpu


def dependent_launch(x: Tensor) -> dict[str, Any]:
    """Options of a launch that may begin before the kernel in front of it has ended (programmatic dependent launch).

    A kernel that is launched so has a constexpr PDL and, where that is true, calls `gdc_wait` before it touches what
    earlier kernels of the step read or write. PDL is true on NVIDIA's GPUs from sm_90 on.
    """
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and launches_early(x.device.index) else {"PDL": False}


@functools.cache
def launches_early(index: int) -> bool:
    """True if kernels of this GPU can begin before the ones in front have ended."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a kernel was launched with: tensors on the meta device, numbers, constants and options."""

    kernel: Kernel
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


# Who notes the launches on meta tensors; one list per thread, and only while `noted_launches` is open.
_NOTES: ContextVar[list[Launch] | None] = ContextVar("noted launches", default=None)


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """The launches on meta tensors that happen inside, in their order."""
    notes: list[Launch] = []
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


class Kernel:
    """A Triton kernel that is not turned into one before its first launch.

    Positional arguments are a launch's own, keywords are constants and options.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__
        # Threads that compile and one that launches must find the same one, or each compiles for itself.
        self._lock = threading.RLock()
        self._compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            first = next(a for a in args if isinstance(a, Tensor))
            if first.is_cuda:
                return self._launches.launch(first.device.index, grid, args, kwargs)
            if first.is_meta:
                notes = _NOTES.get()
                if notes is not None:
                    notes.append(Launch(self, args, kwargs))
                return None
            with _library_interpreted():
                return self._interpreted[grid](*args, **kwargs)

        return launch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Only kernels call a kernel as a function, and Triton reads that from their source."""
        raise TypeError(f"kernel {self.__name__} is launched as {self.__name__}[grid](...), not called.")

    @property
    def compiled(self) -> Any:
        """The kernel as a `triton.JITFunction`, of which there is one."""
        if self._compiled is None:
            import triton

            with self._lock:
                if self._compiled is None:
                    keep_apart()
                    self._compiled = triton.jit(self._bound())
        return self._compiled

    @cached_property
    def _launches(self) -> Launches:
        return Launches(self.compiled)

    @cached_property
    def _interpreted(self) -> Any:
        from triton.runtime.interpreter import InterpretedFunction

        return InterpretedFunction(self._bound())

    def _bound(self) -> types.FunctionType:
        """The function over globals in which `tl` is Triton's language and other kernels are Triton's own."""
        if not triton_available():
            raise DeviceError("Triton is not installed, but GPU kernels need it; install triton or run on the CPU.")
        import triton.language as tl

        assert isinstance(self.fn, types.FunctionType)
        scope = dict(self.fn.__globals__, tl=tl)
        for name in self.fn.__code__.co_names:
            if isinstance(scope.get(name), Kernel):
                scope[name] = scope[name].compiled
        bound = types.FunctionType(self.fn.__code__, scope, self.fn.__name__, self.fn.__defaults__)
        bound.__annotations__ = self.fn.__annotations__
        bound.__module__ = self.fn.__module__
        bound.__qualname__ = self.fn.__qualname__
        return bound

    def compile_for(
        self,
        capability: int,
        signature: Mapping[str, str],
        constexprs: Mapping[str, Any],
        aligned: Container[str] = (),
        **options: Any,
    ) -> Any:
        """Compile for NVIDIA's sm_`capability` on a machine without one; for tests of registers and shared memory.

        `aligned` names the pointers and integers that are multiples of 16, as a launch would find out by itself.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types_ = {**signature, **dict.fromkeys(constexprs, "constexpr")}
        places = [i for i, name in enumerate(self.compiled.arg_names) if name in aligned]
        attributes = {(i,): [["tt.divisibility", 16]] for i in places}
        source = ASTSource(self.compiled, types_, constexprs=dict(constexprs), attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def kernel(fn: Callable[..., Any]) -> Kernel:
    """Declare a Triton kernel, or a function that kernels call."""
    return Kernel(fn)


@contextmanager
def _library_interpreted() -> Iterator[None]:
    """Let interpreted kernels call `tl.sum` and its like, and our own helpers: compiled functions outside a launch."""
    from triton.language import standard
    from triton.runtime.interpreter import _patch_lang
    from triton.runtime.jit import JITFunction

    original = JITFunction.__call__
    language = _patch_lang(standard.sum.fn)
    JITFunction.__call__ = lambda self, *args, **kwargs: self.fn(*args, **kwargs)
    try:
        yield
    finally:
        JITFunction.__call__ = original
        language.restore()
