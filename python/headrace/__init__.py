"""Decoder LLMs under one hard memory limit, with the same tokens as if everything fitted.

    import headrace

    engine = headrace.Engine.load("model-dir-or.gguf")
    print(engine.generate("The capital of France is", max_new_tokens=16).text)
"""

from headrace._catalog import fetch
from headrace._core import (
    BudgetError,
    ContextLengthError,
    DeviceError,
    EngineFailedError,
    HeadraceError,
    ModelFormatError,
    NonFiniteError,
    UnsupportedModelError,
    build_info,
)
from headrace._engine import Engine
from headrace._plan import MemoryPlan, ModelSummary, Need, PieceEntry, PlacementChoice, Plan, TensorEntry, Trade, TradeRow, plan
from headrace._probe import CardReport, ChunkSpeed, HostReport, MachineReport, probe
from headrace._residency import PolicyOutcome, Simulation, TensorTrace, simulate
from headrace._results import BatchResult, Generation, GenerationStats, Stream
from headrace._serve import Pieces, Request, Server
from headrace._stats import (
    ClockStats,
    DeviceStats,
    GraphStats,
    HolderStats,
    KvStats,
    PhysicalStats,
    PoolStats,
    SourceStats,
    Stats,
    TimeStats,
    TokenStats,
    WeightStats,
)

__all__ = [
    "BatchResult",
    "BudgetError",
    "CardReport",
    "ChunkSpeed",
    "ClockStats",
    "ContextLengthError",
    "DeviceError",
    "EngineFailedError",
    "DeviceStats",
    "Engine",
    "Generation",
    "GenerationStats",
    "GraphStats",
    "HeadraceError",
    "HolderStats",
    "HostReport",
    "KvStats",
    "MachineReport",
    "MemoryPlan",
    "ModelFormatError",
    "ModelSummary",
    "Need",
    "NonFiniteError",
    "PhysicalStats",
    "PieceEntry",
    "Pieces",
    "PlacementChoice",
    "Plan",
    "PolicyOutcome",
    "PoolStats",
    "Request",
    "Server",
    "Simulation",
    "SourceStats",
    "Stats",
    "Stream",
    "TensorEntry",
    "TensorTrace",
    "TimeStats",
    "TokenStats",
    "Trade",
    "TradeRow",
    "UnsupportedModelError",
    "WeightStats",
    "__version__",
    "build_info",
    "fetch",
    "plan",
    "probe",
    "simulate",
]

__version__ = build_info()["version"]
