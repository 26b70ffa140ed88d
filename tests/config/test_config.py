"""Loading, extending, overriding; each mistake names field, value, rule and way out."""

from pathlib import Path

import pytest

from olmo_shard.config import dump_yaml, load_config
from olmo_shard.errors import ConfigurationError
from tests.support.configs import write_config


def test_overrides_win_over_extends_which_wins_over_the_base(tmp_path):
    write_config(tmp_path)
    child = tmp_path / "child.yaml"
    child.write_text("extends: config.yaml\noptim: {lr: 0.5}\nmodel: {moe: {top_k: 1}}\n")
    config = load_config(str(child), ["train.steps=9", "data.sources.0.weight=2.0"])
    assert config.optim.lr == 0.5
    assert config.model.moe is not None
    assert (config.model.moe.top_k, config.model.moe.num_experts) == (1, 4)
    assert config.train.steps == 9
    assert config.data.sources[0].weight == 2.0


def test_dump_reads_back_to_an_equal_config(tmp_path):
    config = load_config(str(write_config(tmp_path)))
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(config))
    assert load_config(str(again)) == config


def test_yaml_1_2_numbers(tmp_path):
    config = load_config(str(write_config(tmp_path)), ["optim.lr=1e-3", "train.steps=1_000"])
    assert config.optim.lr == 0.001
    assert config.train.steps == 1000


@pytest.mark.parametrize("number", ["1e3", "1000.0", "1_000", "1000"])
def test_whole_numbers_in_any_spelling(tmp_path, number):
    config = load_config(str(write_config(tmp_path)), [f"train.steps={number}", "optim.lr=1"])
    assert (config.train.steps, type(config.train.steps)) == (1000, int)
    assert (config.optim.lr, type(config.optim.lr)) == (1.0, float)


def test_a_mistake_is_blamed_on_the_file_that_has_it(tmp_path):
    base = write_config(tmp_path)
    middle, child = tmp_path / "middle.yaml", tmp_path / "child.yaml"
    typos = base.read_text().replace("log_every: 1", "log_evry: 1").replace("dtype:", "dtpe:", 1)
    base.write_text(typos + "trian: {a: 1}\n")
    middle.write_text("extends: config.yaml\noptim: {lr: -1}\ntrain: {steps: 0}\n")
    child.write_text("extends: middle.yaml\ntrain: {steps: 4, epochs: 2}\nmodel: {d_modle: 3}\n")
    with pytest.raises(ConfigurationError) as error:
        load_config(str(child), ["run.seed=-1"])
    lines = set(str(error.value).splitlines()[1:])
    assert lines == {
        f"  trian: unknown key (value {{'a': 1}}); did you mean train? (in {base})",
        f"  data.sources.0.dtpe: unknown key (value 'uint16'); did you mean dtype? (in {base})",
        f"  train.log_evry: unknown key (value 1); did you mean log_every? (in {base})",
        f"  optim.lr = -1: Input should be greater than 0 (in {middle})",
        "  model.d_modle: unknown key (value 3); did you mean d_model?",
        "  run.seed = -1: Input should be greater than or equal to 0 (in the override run.seed=-1)",
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=5", r"train\.stepz: unknown key \(value 5\); did you mean steps\?"),
        ("model.moe.router.scorin=x", r"router\.scorin: unknown key .* did you mean scoring\?"),
        ("data.sources.0.pth=x", r"data\.sources\.0\.pth: .* did you mean path\?"),
        ("train.steps=five", r"train\.steps = 'five': .* valid integer"),
        ("train.steps=0", r"train\.steps = 0: .* greater than 0"),
        ("train.steps=true", r"train\.steps = True: .* valid integer"),
        ("optim.lr=.nan", r"optim\.lr = nan: .* finite"),
        ("optim.lr=.inf", r"optim\.lr = inf: .* finite"),
        ("parallel.mode=zero3", r"parallel\.mode = 'zero3': .*'ddp' or 'fsdp'"),
        ("parallel.dispatch=post", r"parallel\.dispatch = 'post': .*'collective' or 'rowwise'"),
        ("parallel.capacity_factor=0", r"parallel\.capacity_factor = 0: .*greater than 0"),
        ("parallel.capacity_factor=.inf", r"parallel\.capacity_factor = inf: .*finite number"),
        ("optim.name=muon", r"optim\.name = 'muon': .*'adamw' or 'sgd'"),
        ("tracking.wandb=off_line", r"tracking\.wandb = 'off_line': .*'offline'"),
        (
            "train.tokens=100",
            r"exactly one of steps, tokens, epochs; found steps = 6, tokens = 100",
        ),
        ("model.moe.top_k=5", r"top_k = 5 of num_experts = 4"),
        ("model.moe.top_k=0", r"top_k = 0: .* greater than 0"),
        ("model.n_heads=5", r"n_heads = 5 is not a multiple of n_kv_heads = 2"),
        ("model.d_model=30", r"d_model = 30 is not a multiple of n_heads = 4"),
        ("model.head_dim=7", r"head_dim = 7 must be even"),
        ("model.ffn_hidden=null", r"ffn_hidden is needed"),
        ("model.n_dense_layers=3", r"n_dense_layers = 3 is more than n_layers = 2"),
        ("train.micro_batch_tokens=40", r"micro_batch_tokens = 40 is not a multiple of .* = 16"),
        ("parallel.expert_parallel=3", r"expert_parallel = 3 does not divide .* = 4"),
        ("schedule.name=wsd", r"wsd needs decay_steps"),
        ("schedule.decay_steps=5", r"decay_steps = 5 is for name = wsd, not cosine"),
        ("data.validation.held_out.weight=2.0", r"a validation set has no weight"),
        ("run=3", r"run = 3: a section is needed"),
        ("run.dir=''", r"run\.dir = '': .*at least 1 character"),
        (
            "run.timeout_seconds=99999999999",
            r"timeout_seconds = 99999999999: .* less than or equal",
        ),
        ("train.steps=1.5", r"train\.steps = 1\.5: a whole number is needed"),
        (
            "parallel.ddp.overlap_reduce=true",
            r"overlap_reduce: .* is called parallel\.ddp\.overlap_grad_reduce now",
        ),
        (
            "parallel.ddp.overlap_gather=true",
            r"overlap_gather: .* is called parallel\.ddp\.overlap_param_gather now",
        ),
        ("train.lr=1", r"train\.lr: unknown key \(value 1\); did you mean optim\.lr\?"),
        ("model.top_k=1", r"did you mean model\.moe\.top_k\?"),
        ("warmup_steps=1", r"did you mean schedule\.warmup_steps\?"),
        ("model.keep_last=1", r"did you mean checkpoint\.keep_last\?"),
        ("parallel.every=1", r"did you mean eval\.every or checkpoint\.every\?"),
        ("data.validation.held_out.pth=x", r"pth: .* did you mean path\?"),
        ("data.sources.0.path=[]", r"data\.sources\.0\.path = \[\]: .*at least 1 item"),
        ("data.sources=[]", r"data\.sources = \[\]: .*at least 1 item"),
        ("model.n_dense_layers=2", r"n_dense_layers = 2 leaves no layer"),
        ("model.vocab_size=99999999999", r"vocab_size = 99999999999: .*less than or equal"),
        ("schedule.total_steps=2", r"warmup_steps = 2 is not below total_steps = 2"),
        ("checkpoint.init_from=''", r"init_from = '': .*at least 1 character"),
        ("train.steps", r"override 'train\.steps': write section\.field=value"),
        ("data.sources.4.path=x", r"'4' is no place in a list of 1 item"),
        ("train.steps.more=1", r"'more' lies below 6, a plain value"),
        ('run.dir="a', r"not valid YAML"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(tmp_path, override, message):
    with pytest.raises(ConfigurationError, match=message):
        load_config(str(write_config(tmp_path)), [override])


def test_a_set_whose_name_looks_like_a_type_keeps_its_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"data\.validation\.stream\.weight = 'x'"):
        load_config(str(write_config(tmp_path)), ["data.validation.stream={path: a, weight: x}"])


def test_expert_parallel_needs_experts(tmp_path):
    overrides = ["model.moe=null", "model.n_dense_layers=0", "parallel.expert_parallel=2"]
    with pytest.raises(ConfigurationError, match=r"expert_parallel = 2, but the model has no moe"):
        load_config(str(write_config(tmp_path)), overrides)


@pytest.mark.parametrize("dispatch", ["local", "collective"])
def test_a_heap_that_dispatch_does_not_use_is_refused(tmp_path, dispatch):
    overrides = ["parallel.symmetric_heap=torch", f"parallel.dispatch={dispatch}"]
    with pytest.raises(
        ConfigurationError, match=f"symmetric_heap = torch .* dispatch = {dispatch}"
    ):
        load_config(str(write_config(tmp_path)), overrides)


def test_local_dispatch_needs_one_rank(tmp_path):
    overrides = ["parallel.dispatch=local", "parallel.expert_parallel=2"]
    with pytest.raises(ConfigurationError, match=r"dispatch = local .* expert_parallel = 2"):
        load_config(str(write_config(tmp_path)), overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", r"bad\.yaml line 2: not valid YAML: found duplicate key"),
        ("a: [1\n", r"bad\.yaml .*not valid YAML"),
        ("", r"holds no sections"),
        ("- 1\n", r"holds no sections"),
        ("extends: bad.yaml\n", r"goes round in a circle"),
        ("extends: 3\n", r"extends = 3 must be the path"),
        ("extends: none.yaml\n", r"cannot read the config .*none\.yaml: No such file"),
        ("run: {}\n", r"data: missing"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load_config(str(path))


def test_a_missing_file_and_a_binary_one(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read the config nowhere\.yaml"):
        load_config("nowhere.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="is not UTF-8 text"):
        load_config(str(binary))


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["parallel.expert_parallel=2"], 3, r"expert_parallel = 2 does not divide the 3 rank"),
        ([], 3, r"256 is not a multiple of ranks x .* = 3 x 32 = 96 \(remainder 64\)"),
        (["train.global_batch_tokens=160", "train.micro_batch_tokens=64"], 2, r"remainder 32"),
        (
            ["parallel.mode=fsdp", "model.moe.hidden=15", "model.moe.num_experts=2"],
            4,
            r"2 local expert\(s\) over 4 ranks along 2 x moe\.hidden = 30",
        ),
    ],
)
def test_the_number_of_ranks_must_fit(tmp_path, overrides, world_size, message):
    config = load_config(str(write_config(tmp_path)), overrides)
    with pytest.raises(ConfigurationError, match=message):
        config.check_world(world_size)


CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = {
    # name: total and active parameters, ranks
    "tiny": (3_772_800, 2_888_064, 2),
    "cpu-bench": (24_670_208, 8_155_136, 2),
    "olmoe-1b-7b": (6_919_161_856, 1_282_017_280, 64),
    "small-64e": (40_613_603_840, 4_280_445_440, 64),
}


def test_every_shipped_config_is_in_the_list():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_build_with_the_stated_parameters(name):
    import torch

    from olmo_shard.nn.flops import parameter_counts
    from olmo_shard.nn.transformer import Transformer

    total, active, world_size = SHIPPED[name]
    config = load_config(str(CONFIGS / f"{name}.yaml"))
    config.check_world(world_size)
    with torch.device("meta"):
        model = Transformer(config.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == total
    assert parameter_counts(config.model) == (total, active)


def test_every_config_field_has_a_sentence_or_a_plain_name():
    from pydantic import BaseModel

    from olmo_shard.config import Config

    def models(model: type[BaseModel]) -> list[type[BaseModel]]:
        nested = [
            each
            for field in model.model_fields.values()
            for each in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(each, type) and issubclass(each, BaseModel)
        ]
        return [model, *(found for each in nested for found in models(each))]

    plain = {"beta1", "beta2", "eps", "norm_eps", "project", "entity"}
    for model in models(Config):
        for name, field in model.model_fields.items():
            section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert field.description or section or name in plain, f"{model.__name__}.{name}"
