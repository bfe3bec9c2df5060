"""Read YAML files with limits on their size, and without duplicate keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from calibrators.limits import read_text
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, reading_error

#: Exceptions of PyYAML for a file that is no YAML. ValueError: it is no UTF-8 text; RecursionError:
#: brackets nested too deeply; the others: a value that its tag does not fit (``!!bool maybe``).
_NO_YAML = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError)
#: Most bytes of a file: five times a file with an override for each of 10,000 nodes.
_BYTES = 1 << 22
#: Most values that aliases add to those written out: a hundred times those of the largest in use.
_VALUES = 100_000
#: Most brackets inside each other.
_DEEPEST = 100
#: More than any file of that many bytes can hold, for a node that contains itself.
_ENDLESS = _BYTES + _VALUES
#: The tag of the key ``<<``, which may stand beside keys of the mapping that it merges.
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """Return the document of a YAML file; None if it is empty.

    Args:
        path: path of the file, in UTF-8.

    Raises:
        ConfigError: the file is missing, or is not YAML; the message names it.
    """
    try:
        return yaml.load(read_text(path, _BYTES), _Loader)
    except OSError as error:
        raise reading_error(
            ConfigError, f"config file {path} cannot be read: {error.strerror}", error
        ) from error
    except _NO_YAML as error:
        # PyYAML writes several lines.
        reason = " ".join(str(error).split())
        raise ConfigError(f"config file {path} is not valid YAML: {reason}") from error


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys and excessive aliases.

    YAML would take the last of duplicate keys.
    """

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803
        """Begin a list or a mapping in brackets, unless too many are open."""
        # The scanner compares each bracket with all open ones: 100,000 take 10 seconds.
        if self.flow_level >= _DEEPEST:
            raise yaml.scanner.ScannerError(
                None, None, f"more than {_DEEPEST} brackets are open", self.get_mark()
            )
        super().fetch_flow_collection_start(TokenClass)

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Return the node of a mapping, unless a key is given twice."""
        # Before construction, which adds the keys that ``<<`` merges, and the mapping overrides.
        node = super().compose_mapping_node(anchor)
        seen = set[Any]()
        for key_node, _ in node.value:
            # Other keys, such as lists, are refused by the base class: they have no hash.
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE:
                continue
            # Compared as values: "1" and "0x1" are the same key.
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{short(key)} is given twice", node.start_mark
                )
            seen.add(key)
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        """Construct a document, unless the aliases expand too far."""
        # Aliases of aliases multiply: a file of a kilobyte may stand for billions of values.
        counts: dict[int, int] = {}
        expanded = _expanded(node, counts)
        # Each node is written out once; the size of the file limits their number.
        if expanded - len(counts) > _VALUES:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"its aliases stand for more than {_VALUES:,} values",
                node.start_mark,
            )
        return super().construct_document(node)


def _expanded(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values of a node with expanded aliases.

    A node that contains itself exceeds the limit.

    Args:
        counts: numbers of values by the identity of a node; counted nodes are added.
    """
    if id(node) not in counts:
        # Provisional: a node that is met again before its count is known contains itself.
        counts[id(node)] = _ENDLESS + 1
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for entry in node.value for child in entry]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        # Aliases share the node: each node is counted once, so that counting costs no expansion.
        counts[id(node)] = 1 + sum(_expanded(child, counts) for child in children)
    return counts[id(node)]
