from dtckpt.cli.name_groups import TreeLeaf, tree_rows

LEAVES = [
    TreeLeaf("model/layers.{0..31}.mlp.w", 32, 32 << 10, ("8x8", "float32")),
    TreeLeaf("model/layers.{0..31}.norm", 32, 3200, ("25", "float32")),
    TreeLeaf("model/layers.{0..2,4}.extra", 4, 16, ("", "bool")),
    TreeLeaf("model/embed", 1, 100, ("25", "float32")),
    TreeLeaf("optim", 1, 8, ("2", "float32")),
    TreeLeaf("optim/state/step", 1, 4, ("scalar", "int32")),
]


def test_sizes_add_up_in_natural_order():
    assert tree_rows(LEAVES, by_size=False) == [
        ("model/", "69", "35.2 KiB", "", ""),
        ("  embed", "1", "100 B", "25", "float32"),
        ("  layers.", "68", "35.1 KiB", "", ""),
        ("    {0..2,4}.extra", "4", "16 B", "", "bool"),
        ("    {0..31}.", "64", "35.1 KiB", "", ""),
        ("      mlp.w", "32", "32.0 KiB", "8x8", "float32"),
        ("      norm", "32", "3.1 KiB", "25", "float32"),
        ("optim", "1", "8 B", "2", "float32"),
        ("optim/state/step", "1", "4 B", "scalar", "int32"),
    ]


def test_the_largest_first():
    rows = tree_rows(LEAVES, by_size=True)
    assert [row[0].strip() for row in rows] == [
        *["model/", "layers.", "{0..31}.", "mlp.w", "norm", "{0..2,4}.extra", "embed"],
        *["optim", "optim/state/step"],
    ]


def test_no_leaves_and_names_that_begin_with_a_separator():
    assert tree_rows([], by_size=True) == []
    rows = tree_rows([TreeLeaf("/a..b", 1, 1, ("1", "int8"))], by_size=False)
    assert rows == [("/a..b", "1", "1 B", "1", "int8")]
