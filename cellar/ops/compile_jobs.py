"""What launches ask of the compiler, as data: listed without a device, compiled for any, several at a time.

A launch of a Triton kernel is compiled once for each combination of types, of integers that are 1 or multiples of 16,
and of constants. To know them all before the first request, the code that launches is run on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cellar.ops.triton_support import Kernel, Launch

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


# Instructions of NVIDIA's that a kernel may be compiled with, and the compute capability that has them.
_SINCE = {"PTX": 80, "E4M3": 89}


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel for one device: `key` is equal for launches that the compiler does not tell apart.

    signature: type of each parameter; constants and attributes: by place, as Triton's compiler wants them.
    """

    key: str
    kernel: Kernel
    target: GPUTarget
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]

    def compile(self) -> Any:
        """-> Triton's compiled kernel, which it keeps on disk, too."""
        import triton
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel.compiled, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=self.target, options=dict(self.options))


def jobs_of(launches: Iterable[Launch], target: GPUTarget) -> list[CompileJob]:
    """What these launches need on such a device, each once, in the order of the launches."""
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    found: dict[str, CompileJob] = {}
    for launch in launches:
        job = _job(launch, target, backend)
        found.setdefault(job.key, job)
    return list(found.values())


def key_of(launch: Launch, target: GPUTarget) -> str:
    """Equal for launches that the compiler does not tell apart on such a device."""
    from triton.compiler.compiler import make_backend

    return _bound(launch, target, make_backend(target))[0]


def _bound(launch: Launch, target: GPUTarget, backend: Any) -> tuple[str, Any, Any, Any]:
    """The key, and what Triton's binder makes of the arguments."""
    from triton.runtime.jit import create_function_from_signature

    function = launch.kernel.compiled
    binder = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, given = binder(*launch.args, **on_target(launch.kwargs, target))
    return f"{launch.kernel.__name__}{specialization}{sorted(given.items())}", bound, specialization, given


def _job(launch: Launch, target: GPUTarget, backend: Any) -> CompileJob:
    function = launch.kernel.compiled
    key, bound, specialization, given = _bound(launch, target, backend)
    kwargs = on_target(launch.kwargs, target)
    options, signature, constants, attributes = function._pack_args(backend, kwargs, bound, specialization, given)
    return CompileJob(key, launch.kernel, target, signature, constants, attributes, vars(options))


def on_target(kwargs: Mapping[str, Any], target: GPUTarget) -> dict[str, Any]:
    """Keywords of a launch that was noted on the meta device, as they are on the target.

    PDL: see `dependent_launch`. PTX, E4M3: whether the kernel may have NVIDIA's instructions (sm_80 and later), and
    those that make e4m3 (sm_89 and later).
    """
    if not {"PDL", *_SINCE}.intersection(kwargs):
        return dict(kwargs)
    is_cuda = target.backend == "cuda"
    dependent = is_cuda and target.arch >= 90
    there: dict[str, Any] = {}
    for name, value in kwargs.items():  # in the order of the launch, which Triton's own cache tells apart
        there[name] = dependent if name == "PDL" else value
        if name in _SINCE:
            there[name] = value and is_cuda and target.arch >= _SINCE[name]
        if name == "PDL" and dependent:
            there["launch_pdl"] = True
    return there
