"""Modules import each other in one direction only; the order of the folders is import-linter's (pyproject.toml)."""

import pytest

grimp = pytest.importorskip("grimp")


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("hvd_compress", cache_dir=None)  # type-only imports included
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # Without the modules that import none of the others, again and again, circles remain (and what imports them).
    while leaves := {module for module, imported in imports.items() if not imported & imports.keys()}:
        imports = {module: imported for module, imported in imports.items() if module not in leaves}
    while unused := imports.keys() - {name for imported in imports.values() for name in imported}:
        imports = {module: imported for module, imported in imports.items() if module not in unused}
    assert not imports, sorted(imports)
