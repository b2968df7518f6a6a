"""Texts of PyTorch, CUDA and crossrank, which reveal nothing about the user. All other texts are replaced.

A text passes only as a whole: it has the form of its kind, and all its words are public. A public word is in PyTorch's
own names (`public_words.txt`, which `python -m tests.public_words` writes) or in `more_words.txt`. So unforeseen texts
are replaced.
"""

from __future__ import annotations

import builtins
import re
import signal
import sys
from functools import lru_cache
from pathlib import Path

PUBLIC_WORDS = Path(__file__).with_name("public_words.txt")
_MORE_WORDS = Path(__file__).with_name("more_words.txt")
"""Words of CUDA, ROCm, Kineto, Python's own modules, and crossrank."""
_WORD_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_NUMBER = re.compile(r"\d+")
_LONGEST_NUMBER = 9
"""Digits of the longest public number. A longer one may be a serial number or a time."""
_TOKEN = re.compile(r"[A-Za-z0-9]+")
_BESIDE_DIGITS = re.compile(r"(?:(?<=\d)|(?<![A-Za-z0-9]))(?![xX])[A-Za-z](?=\d)")
_MOST_LETTERS = 3
"""Single letters in front of digits that a token may have, such as m16n8k16: in more of them, there may be a word."""


def parts_of(text: str) -> list[str]:
    """Return the words of a name in lower case.

    >>> parts_of("aten::_foreach_addMM"), parts_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    (['aten', 'foreach', 'add', 'mm'], ['nccl', 'dev', 'kernel', 'all', 'reduce', 'sum', 'f', 'ring', 'll'])
    """
    return [part.lower() for part in _WORD_PART.findall(text)]


@lru_cache(maxsize=1)
def _words() -> frozenset[str]:
    return frozenset(PUBLIC_WORDS.read_text().split()) | frozenset(_MORE_WORDS.read_text().split())


@lru_cache(maxsize=1 << 16)
def is_public(text: str) -> bool:
    """Return whether all words of a text are public, and no number in it is long."""
    return (
        text.isascii()
        and all(len(number) <= _LONGEST_NUMBER for number in _NUMBER.findall(text))
        and all(len(part) == 1 or part in _words() for part in parts_of(text))
        and all(len(_BESIDE_DIGITS.findall(token)) <= _MOST_LETTERS for token in _TOKEN.findall(text))
    )


_OPS = (
    r"(?:aten|prim|prims|inductor|c10d|c10d_functional|_c10d_functional|c10d_functional_autograd|profiler|quantized|"
    r"nccl|gloo|mpi|ucc|hccl|fsdp|fbgemm|symm_mem|cudnn|mkldnn|nvprims|higher_order):{1,2}[\w:]+(?:\.\w+)?"
)
_OPTIMIZERS = (
    "Adadelta|Adafactor|Adagrad|Adam|AdamW|Adamax|ASGD|LBFGS|Muon|NAdam|RAdam|RMSprop|Rprop|SGD|SparseAdam|"
    "ZeroRedundancyOptimizer|FusedAdam|DeepSpeedZeroOptimizer"
)
_NAMESPACES = (
    r"at|c10|cub|thrust|cutlass\w*|cask\w*|cublas\w*|cudnn\w*|fmha\w*|pytorch_flash|flash|nvfuser|at_cuda_detail|"
    r"fbgemm_gpu|fbgemm|deep_ep|ck|rocprim|hipcub|\(anonymous namespace\)"
)
KERNEL = re.compile(
    rf"(?P<head>(?:void )?(?:{_NAMESPACES})::(?:(?:\w+|\(anonymous namespace\))::)*\w+|"
    r"(?:void )?(?:multi_tensor_apply_kernel|vectorized_elementwise_kernel|elementwise_kernel|reduce_kernel|dot_kernel|"
    r"splitKreduce_kernel|reduce_1Block_kernel|gemv\w{0,24}|gemm\w{0,24}|cunn_\w+|softmax_warp_\w+|indexSelect\w+|"
    r"implicit_convolve_\w+|(?:dense|split)_embedding_\w+|bounds_check_indices_kernel|linearize_index_kernel|"
    r"cross_device_reduce_[12]stage\w*|(?:multimem|one_shot|two_shot)_\w+|\w{0,12}ShotAllReduceKernel|"
    r"allreduce_fusion_kernel\w*|rcclGenericKernel\w*|mscclKernel\w*|mscclRunInterpreterKernel\w*)|"
    r"(?:volta|turing|ampere|hopper|maxwell|pascal|sm\d\d\d?|cudnn|cutlass|nvjet|cublas|xmma|Cijk|igemm)_\w+|"
    r"(?:void )?nccl(?:Dev|SymkDev|SymDev|Symk|Sym)?Kernel\w*|triton_(?:poi|red|per|tem|mm|for)_fused_)(?P<rest>.*)",
    re.DOTALL,
)
"""The name of a kernel of a public library: its `head` stays, and the `rest` is replaced."""
_CALLS = r"(?:cuda|cu|cudnn|cublas|hip|roc|nvtx|nccl)[A-Z]\w*"
_AUTOGRAD = (
    r"(?:autograd::engine::evaluate_function: )?(?:torch::(?:autograd|nn|dynamo|jit)::[\w:<>]+|[A-Z]\w*Backward\d+|"
    r"AccumulateGrad|torch::autograd::AccumulateGrad)"
)
_RANGES = (
    r"(?:process|thread)_(?:name|labels|sort_index|uptime_seconds)|ac2g|fwdbwd|detach_?|Trace|"
    r"RegisterPostBackwardFunction(?:Backward)?|PythonSubclass|torch\.distributed\.ddp\.reducer::\w+|"
    r"## (?:forward|backward|optimizer|zero_grad) ##|"
    rf"ProfilerStep#\d+|crossrank#\d+|Optimizer\.(?:step|zero_grad)#(?:{_OPTIMIZERS})\.(?:step|zero_grad)|"
    r"DistributedDataParallel\.forward|FullyShardedDataParallel\.\w+|FSDP::(?:pre_forward|post_forward|pre_backward|"
    r"post_backward|all_gather|all_gather_copy_in|all_gather_copy_out|post_backward_reduce|post_backward_reshard|"
    r"post_backward_accumulate|root_post_backward_callback|post_backward_rs_wait|post_backward_ar_wait)|"
    r"enumerate\(DataLoader\)#_\w+\.__next__|record_param_comms|## process_group:init ##|"
    r"\(none\), phase '\w'|\[pytorch\|profiler\|execution_(?:graph|trace)\|(?:thread|process)\]|"
    r"Lazy Function Loading|"
    r"(?:Mem(?:cpy|set)|Copy\w+)(?: [\w (>),-]*)?|(?:Stream|Event|Context|Device)(?: Wait)?(?: (?:Sync|Event))|"
    r"Iteration Start: PyTorch Profiler|Record Window End|PyTorch Profiler(?: \(\d+\))?|Traces|Spans|\[memory\]|"
    r"(?:gloo|nccl|mpi|ucc|hccl):(?:[a-z_0-9]{1,40}|(?:send|recv) \d+(?:->|<-)\d+)(?:, (?:seq|op_id) = \d+)*|"
    r"Activity Buffer Request|Resource|Trigger|Command Buffer Full|"
    r"hipMemcpyWithStream|Compute Kernel|Runtime Triggered Module Loading|INVALID"
)
_LITERALS = (
    r"(?!(?:.|\n)*(?:\d\.\d+\.\d+\.\d|\d-\d\d?-\d|\d:\d\d:\d|\d{20}))[\s\d.,\[\](){}:e+-]*|true|false|True|False|None|-?inf|nan|"
    r"\[(?:(?:True|False|None)(?:, )?)*\]|trunc|floor|zeros|border|reflect|constant|replicate|'?(?:none|sum|mean)'?"
)
"""Nested numbers of up to 64 bits, except internet addresses and times; and other literals of operations."""
_DEVICE = r"(?:cpu|cuda|hip|xpu|mps|meta|privateuseone)(?::-?\d+)?"
_DTYPE = (
    r"(?:torch\.)?(?:u?int(?:8|16|32|64)?|bool|float(?:16|32|64|8_\w+|4_\w+)?|double|half|bfloat16|"
    r"complex(?:32|64|128)?|long|"
    r"short|byte|char|Byte|Char|Short|Int|Long|Half|Float|Double|Bool|BFloat16|Complex\w*|"
    r"ComplexFloat|Float8_\w+|UInt\d+|"
    r"c10::\w+|signed char|unsigned char|long int|short int|Scalar|ScalarList|TensorList)"
)
_TYPE_WORDS_TEXT = """
Tensor GenericList GenericDict Tuple Int Double Bool String Device None Object Stream Generator Symbol Capsule
ComplexDouble SymInt SymFloat SymBool Storage nullptr uninitialized Enum Quantizer Undefined Await Future Blob
IntList DoubleList BoolList TensorList Any unsigned signed long int char float double bool short half c10 Scalar
ScalarList Float Half Long Byte Char Short BFloat16 Complex ComplexFloat ComplexHalf Float8_e4m3fn Float8_e5m2
Float8_e4m3fnuz Float8_e5m2fnuz Float8_e8m0fnu Float4_e2m1fn_x2 complex quint8 qint8 qint32 std string_view
string void
"""
_TYPE = rf"(?:\b(?:{'|'.join(_TYPE_WORDS_TEXT.split())})\b|[\[\](),<>?:* ])*"
_REDUCTIONS = r"sum|avg|product|prod|min|max|band|bor|bxor|premul_sum|AVG|SUM|MIN|MAX|PRODUCT|REDUCE_SCATTER|unused"
_GROUP = (
    r"\d{0,9}|default_pg|default|undefined|(?:(?:mesh|default|pg|group|dp|tp|pp|cp|ep|sp|mp|etp|edp|ddp|"
    r"fsdp|hsdp|zero|world|"
    r"replicate|shard|inter|intra|node|local|data|tensor|model|pipeline|expert|context|sequence|parallel|embedding|"
    r"position|with|and|or|of|all|instance|optimizer|distributed|intra|partial|cpu|gpu|nccl|gloo|"
    r"outer|inner|cross|host|mod)(?:[_ -]|$)|(?!(?:\d+[_ -]){2})\d{1,4}(?:[_ -]|$)){1,9}"
)
_BACKEND = r"(?:(?:cpu|cuda|hip|xpu|mps|gloo|nccl|ucc|mpi|fake|undefined|custom|xccl|hccl)(?:[:,]|$))*"

PATTERNS = {
    "op": re.compile(rf"{_OPS}|{_AUTOGRAD}|{_RANGES}|{_CALLS}", re.DOTALL),
    "value": re.compile(
        rf"|{_LITERALS}|{_DEVICE}|{_DTYPE}|<None>|<Object>|<Generator>|<Symbol>|{_REDUCTIONS}|Tensor\([^()]*\((?:uninitialized)\)\)|"
        r"nccl|gloo|ucc|mpi|strided|sparse_coo|contiguous_format|preserve_format|channels_last(?:_3d)?"
    ),
    "type": re.compile(_TYPE),
    "dtype": re.compile(rf"|string|{_DTYPE}|Tensor\({_DTYPE}\)"),
    "group": re.compile(_GROUP, re.IGNORECASE),
    "backend": re.compile(_BACKEND),
    "reduction": re.compile(rf"|{_REDUCTIONS}|op-\d+"),
    "category": re.compile(
        r"|cpu_op|kernel|gpu_memcpy|gpu_memset|cuda_runtime|cuda_driver|cuda_sync|cuda_event|user_annotation|"
        r"gpu_user_annotation|python_function|ac2g|fwdbwd|async_cpu_to_gpu|async_gpu|Trace|overhead|privateuse1_\w+|"
        r"cpu_instant_event|cuda_profiler_range|hip_runtime|mtia_\w+|xpu_\w+|collective_comm|"
        r"memory_snapshot|\w{1,2}|cpu_to_gpu"
    ),
    "api": re.compile(
        r"(?:(?:nn\.)?functional\.|ProcessGroup\.)?_?(?:remapped_)?"
        r"(?:all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|reduce|broadcast|scatter|gather|permute|"
        r"send|recv|isend|irecv|i?all2all|monitored_barrier|barrier|batch_isend_irecv|wait_tensor|pointToPoint|"
        r"coalesced|init|wait|unknown)"
        r"(?:_?(?:base|single|tensor|into|coalesced|object|list|any|source|v|out|inplace|multigpu|sparse|oop|autograd|"
        r"backward))*_{0,2}"
    ),
    "state": re.compile(r"scheduled|started|completed|timed_out|failed"),
    "reason": re.compile(
        "|hang|window|disable|exit|abort|atexit|exception|job ended|end of the job|minimize|"
        + "|".join(one.name for one in signal.Signals)
    ),
    "schema": re.compile(r"crossrank-comms \d+"),
    "package": re.compile(r"crossrank|python|torch|cuda|nccl|rccl|driver|kernel|hip"),
    "version": re.compile(
        r"|\d{1,8}(?:\.\d{1,8}){0,2}(?:(?:a|b|rc|\.dev|\.post)\d{1,8})?(?:\+(?:cpu|xpu|cu\d{2,3}|rocm[\d.]{1,8}))?|"
        r"\d\.\d\.\d-chakra\.\d\.\d\.\d|compiled|python"
    ),
    "thread": re.compile(r"|MainThread|python\d?(?:\.\d+)?|pt_main_thread|pt_autograd_\d+|Dummy-\d+|Thread-\d+"),
    "field": re.compile(r"ranks|in|out|in_split|out_split|inputs|outputs|members|shapes|rank_runs|split"),
    "fact": re.compile(r"Hostname|EXPORT_SCHEMA_VERSION\w*"),
    "event type": re.compile(r"Nvtx\w+"),
    "memory": re.compile(
        r"|\d+|[HDPA]to[HDPA]|Pageable|Pinned|Device|Array|Managed|Unknown|Peer|Dispatch Kernel|"
        r"Copy\w*|Barrier|Memset"
    ),
    "label": re.compile(
        r"|python[\d.]{0,5}|pt_main_thread|Trace PyTorch Profiler|CPU|GPU \d+|stream \d+ *|PyTorch Profiler|Spans|"
        r"Traces|"
        r"\d{1,7}|(?:thread|stream) \d+(?: \((?:python\d?|pt_\w+|cuda\w*|nccl\w*)\))?"
    ),
    "device name": re.compile(r"(?:NVIDIA|AMD|Tesla|GeForce|Quadro|Intel)[\w -]*"),
    "phase": re.compile(r"[A-Za-z]"),
    "unit": re.compile(r"ms|ns|us"),
    "literal": re.compile(rf"|{_LITERALS}"),
    "edge": re.compile(r"open|close"),
    "function": re.compile(
        r"<module>|<lambda>|<listcomp>|<genexpr>|forward|backward|main|run|step|train|__\w+__|_call_impl"
    ),
    "sync": re.compile(r"(?:Stream|Event|Context|Device)(?: Wait)?(?: (?:Sync|Event))?|Unknown"),
    "emit": re.compile(r"|ALL|CROSSNODE|OFF|0|1|warn|abort|dump|auto|compiled|python|rank|none|off"),
}
"""Kind of text -> pattern of the texts that pass."""

_PACKAGES_TEXT = """
torch torchvision torchaudio torchtitan deepspeed megatron transformers accelerate lightning lightning_fabric
pytorch_lightning torchrec fbgemm_gpu triton numpy crossrank datasets peft xformers flash_attn apex
transformer_engine typing_extensions.py
"""
_PACKAGES = frozenset(_PACKAGES_TEXT.split())
_LIBRARY = re.compile(
    r".*?[/\\](?:(?P<kept>(?:site|dist)-packages)[/\\](?P<package>[\w.]+)(?P<inner>(?:[/\\][\w.-]+)*)|"
    r"lib[/\\](?P<python>python\d[.\d]{0,5})[/\\](?!site-|dist-)(?P<module>[\w.-]+)(?P<rest>(?:[/\\][\w.-]+)*)|"
    r"(?P<own>torch|crossrank)(?!.*[/\\](?:site|dist)-packages[/\\])(?P<below>(?:[/\\][\w.-]+)+))",
    re.DOTALL,
)


def library_path(path: str) -> str | None:
    """Return the part of a path that stays if it belongs to a public library; None for any other path.

    >>> library_path("/home/x/lib/python3.11/site-packages/torch/nn/modules/module.py")
    '/site-packages/torch/nn/modules/module.py'
    >>> library_path("/usr/lib/python3.11/threading.py"), library_path("/srv/torch/secret/model.py")
    ('/lib/python3.11/threading.py', None)
    >>> library_path("/opt/torch/.venv/lib/python3.12/site-packages/torch/distributed/utils.py")
    '/site-packages/torch/distributed/utils.py'
    """
    match = _LIBRARY.fullmatch(path)
    if match is None or ".." in path:
        return None
    if match["package"] is not None:
        kept = f"/{match['kept']}/{match['package']}{match['inner']}"
        return kept if match["package"] in _PACKAGES and is_public(match["inner"]) else None
    if match["module"] is not None:
        public = match["module"].removesuffix(".py") in sys.stdlib_module_names and is_public(match["rest"])
        return f"/lib/{match['python']}/{match['module']}{match['rest']}" if public else None
    return f"/{match['own']}{match['below']}" if is_public(match["below"]) else None


PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")

PYTHON_FRAME = re.compile(r"(?P<file>[^()]+)\((?P<line>\d+)\): (?P<function>.+)", re.DOTALL)
"""Kineto's name of a Python frame."""
RANGE_OF_MODULE = re.compile(
    r"(?P<before>FSDP::[a-z_]{1,40} \(|FSDP::[a-z_]{1,40} for |nn\.Module: )(?P<module>.+?)(?P<after>\)?)", re.DOTALL
)
"""Ranges of torch around the code of a module, with its name."""
PUBLIC_FRAME = re.compile(
    r"(?:torch|importlib|threading|contextlib|functools|multiprocessing|torchgen)[/.].*\.py|"
    r"<built-in.*|<frozen [\w.]+>|"
    r"threading\.py|contextlib\.py|functools\.py"
)

WORDS = frozenset(Path(__file__).with_name("message_words.txt").read_text().split()) | {
    name for name in vars(builtins) if name.endswith(("Error", "Exception", "Interrupt", "Warning", "Exit"))
}
"""Words of messages that stay: those of torch.distributed and its backends for failed communication."""


_KINDS_WITH_WORDS = frozenset(("op", "value", "dtype", "category", "thread", "fact", "event type", "memory", "label"))
_KINDS_WITH_WORDS |= {"device name", "function", "group"}
"""Kinds whose patterns allow free words."""


def passes(kind: str, text: str) -> bool:
    """Return whether a text of a kind reveals nothing about the user."""
    if len(text) > _LONGEST_TEXT:
        return False
    if kind == "group" and text.isascii() and text.isdecimal():
        return len(text) <= _LONGEST_ADDRESS  # a number, or an address in old traces
    return PATTERNS[kind].fullmatch(text) is not None and (kind not in _KINDS_WITH_WORDS or is_public(text))


_LONGEST_TEXT = 4096
_LONGEST_ADDRESS = 15
"""Digits of an address of 48 bits."""
