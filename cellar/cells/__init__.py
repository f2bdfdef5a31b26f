"""What a user imports to define recurrent models: cells, unfold functions, models. See docs/cells.md."""

from cellar.cells.cell import Cell
from cellar.cells.fields import RequestField
from cellar.cells.graph import Graph
from cellar.cells.model import CellModel, UnfoldedRequest
from cellar.cells.refs import Grown, Node, Nodes, Output, Outputs
from cellar.cells.response import ResponsePort

__all__ = [
    "Cell",
    "CellModel",
    "Graph",
    "Grown",
    "Node",
    "Nodes",
    "Output",
    "Outputs",
    "RequestField",
    "ResponsePort",
    "UnfoldedRequest",
]
