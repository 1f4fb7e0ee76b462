"""The stages that core brings itself."""

from kvframe.builtin.allocators import KeepAll, TopK
from kvframe.builtin.encoders import Dense, Int8
from kvframe.builtin.graded import Graded
from kvframe.builtin.kernels import Auto, Cpu, Reference, Sdpa, Triton
from kvframe.builtin.scorers import Uniform
from kvframe.builtin.segmenters import Chunks, Whole
from kvframe.stages import Stage

STAGES: tuple[type[Stage], ...] = (
    *(Whole, Chunks, Uniform, KeepAll, TopK, Graded),
    *(Dense, Int8),
    *(Auto, Cpu, Reference, Sdpa, Triton),
)
