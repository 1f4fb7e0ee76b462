"""The distributions in here are not installed beside kvframe: tests/authoring/test_thirdparty.py runs their tests."""

collect_ignore_glob = ["*"]
