"""Where the node's cgroup subtree is, for the two versions of cgroups."""

from pathlib import Path

from e2e.cluster import cgroups

ROOT = Path("/sys/fs/cgroup")
V1 = """9:name=systemd:/
4:memory:/session/abc
3:cpuset:/
2:cpu,cpuacct:/slice
0::/
"""


def test_own_paths_names_every_controller_of_a_line():
    own = cgroups.own_paths(V1)
    assert own == {
        "systemd": "/",
        "memory": "/session/abc",
        "cpuset": "/",
        "cpu": "/slice",
        "cpuacct": "/slice",
        "": "/",
    }


def test_v1_makes_one_folder_for_each_controller_that_exists():
    groups = cgroups.node_groups("one", V1, v2=False)
    assert groups == [
        ROOT / "cpu/slice/moonpool-one",
        ROOT / "cpuacct/slice/moonpool-one",
        ROOT / "cpuset/moonpool-one",
        ROOT / "memory/session/abc/moonpool-one",
        ROOT / "systemd/moonpool-one",
    ]


def test_v2_makes_one_folder():
    assert cgroups.node_groups("one", "0::/user.slice/x.scope\n", v2=True) == [ROOT / "user.slice/x.scope/moonpool-one"]


def test_a_process_inside_a_node_makes_no_nested_node():
    text = "0::/a/moonpool-other/init\n"
    assert cgroups.node_groups("one", text, v2=True) == [ROOT / "a/moonpool-one"]


def test_removing_what_is_not_there_is_done_at_once(tmp_path):
    assert cgroups.remove([tmp_path / "none"]) == []
    assert cgroups.kill_members([tmp_path / "none"]) == 0


def test_folders_are_removed_deepest_first(tmp_path):
    (tmp_path / "node/kubepods/pod1/c1").mkdir(parents=True)
    assert cgroups.remove([tmp_path / "node"]) == []
    assert not (tmp_path / "node").exists()
