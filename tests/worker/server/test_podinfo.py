from __future__ import annotations

from pathlib import Path

from moonpool_api import names
from moonpool_worker.server import podinfo


def test_values_are_unquoted_as_go_quotes_them() -> None:
    text = 'a/b="plain"\nc="tab\\tquote\\" back\\\\ \\u00e9 \\x41"\nbroken line\nd=""\ne="x=y"'
    assert podinfo.parse(text) == {"a/b": "plain", "c": 'tab\tquote" back\\ é A', "d": "", "e": "x=y"}


def test_grant_through_swapped_links(tmp_path: Path) -> None:
    assert podinfo.read_grant(tmp_path) is None
    for version, tenant in (("..1", "t1"), ("..2", "t2")):
        folder = tmp_path / version
        folder.mkdir()
        (folder / "annotations").write_text(
            f'{names.ANNOTATION_VERIFIED_NAMESPACE}="ns"\n{names.ANNOTATION_GRANTED_TENANT}="{tenant}"'
        )
        link = tmp_path / "..data_tmp"
        link.symlink_to(version)
        link.rename(tmp_path / "..data")
        if not (tmp_path / "annotations").is_symlink():
            (tmp_path / "annotations").symlink_to("..data/annotations")
        assert podinfo.read_grant(tmp_path) == podinfo.Grant("ns", tenant, "")
