"""Conversations: ids equal transformers', masks token by token, every refusal in one sentence."""

import pytest

from surokit.data import Tokenizer, chat, train_tokenizer
from surokit.data.conversations import encode
from surokit.data.templates import DEFAULT_TEMPLATE, normalise, render
from tests.refusals import refused

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")

# The default without its tags: the spans have to be found from the template's behaviour.
UNTAGGED = DEFAULT_TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")

# In the manner of Llama 2: a text that opens with a token, turns in brackets, no header before the answer.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)

# In the manner of Qwen3: the last answer gets an empty thought, earlier ones do not.
THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# No end-of-turn token at all.
PLAIN = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

# The date, JSON, a loop control.
TOOLS = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.role + ':' }}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

TURNS = [
    {"role": "user", "content": "Who are you? — tell"},
    {"role": "assistant", "content": "Call me Ishmael. 🐋"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Some\nyears ago "},
]
SYSTEM = {"role": "system", "content": "You are a sailor."}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = train_tokenizer(
        ["Who are you? Call me Ishmael. Some years ago\n\n\nuser assistant " * 3], 300, special=SPECIAL
    ).backend
    return Tokenizer(backend, {"eos_token": "<|endoftext|>", "bos_token": "<s>"})


@pytest.fixture(scope="module")
def theirs(tokenizer, tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer.save(tmp_path_factory.mktemp("tokenizer"))))


def one(tokenizer, messages, template, train_on="assistant"):
    (encoded,) = encode([("it", normalise(messages, "it"))], tokenizer, template, train_on)
    return encoded


def trained_text(tokenizer, messages, template) -> list[str]:
    """What is trained on, one text for each unbroken run of tokens."""
    encoded = one(tokenizer, messages, template)
    runs, run = [], []
    for i, trained in zip([*encoded.ids_T.tolist(), 0], [*encoded.trained_T.tolist(), False]):
        if trained:
            run.append(i)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


# Against transformers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [TURNS, [SYSTEM, *TURNS], TURNS[:2]], ids=["two", "system", "one"])
@pytest.mark.parametrize(
    "template", [DEFAULT_TEMPLATE, UNTAGGED, THINKING, PLAIN], ids=["default", "untagged", "thinking", "plain"]
)
def test_ids_equal_apply_chat_template(tokenizer, theirs, template, messages):
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=True)
    assert one(tokenizer, messages, template).ids_T.tolist() == expected["input_ids"]
    text = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert render(template, messages, tokenizer.special, "it", prompt=True)[0] == text


def test_ids_equal_apply_chat_template_with_a_begin_of_text_token(tokenizer, theirs):
    expected = theirs.apply_chat_template(TURNS, chat_template=BRACKETS, tokenize=True, return_dict=True)
    assert one(tokenizer, TURNS, BRACKETS).ids_T.tolist() == expected["input_ids"]
    assert expected["input_ids"][0] == 3


@pytest.mark.parametrize("messages", [TURNS, [SYSTEM, *TURNS], TURNS[:2]], ids=["two", "system", "one"])
def test_masks_equal_transformers_where_the_template_has_tags(tokenizer, theirs, messages):
    expected = theirs.apply_chat_template(
        messages,
        chat_template=DEFAULT_TEMPLATE,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    encoded = one(tokenizer, messages, DEFAULT_TEMPLATE)
    assert encoded.trained_T.astype(int).tolist() == expected["assistant_masks"]
    assert encoded.straddling == 0


@pytest.mark.parametrize("messages", [TURNS, [SYSTEM, *TURNS], TURNS[:2]], ids=["two", "system", "one"])
def test_masks_without_tags_equal_those_with_tags(tokenizer, messages):
    tagged, untagged = (one(tokenizer, messages, template) for template in (DEFAULT_TEMPLATE, UNTAGGED))
    assert tagged.ids_T.tolist() == untagged.ids_T.tolist()
    assert tagged.trained_T.tolist() == untagged.trained_T.tolist()


# Masks, token by token -------------------------------------------------------------------------------------------------


def test_every_token_of_a_mask_by_hand(tokenizer):
    pieces = [
        ("<|im_start|>user\nWho are you? — tell<|im_end|>\n<|im_start|>assistant\n", False),
        ("Call me Ishmael. 🐋<|im_end|>", True),
        ("\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Some\nyears ago <|im_end|>", True),
        ("\n", False),
    ]
    encoded = one(tokenizer, TURNS, UNTAGGED)
    expected = [(i, trained) for text, trained in pieces for i in tokenizer.encode(text)]
    assert list(zip(encoded.ids_T.tolist(), encoded.trained_T.tolist())) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (BRACKETS, [" Call me Ishmael. 🐋<|endoftext|>", " Some\nyears ago<|endoftext|>"]),
        (THINKING, ["Call me Ishmael. 🐋<|im_end|>", "<think>\n\n</think>\n\nSome\nyears ago <|im_end|>"]),
        (PLAIN, ["Call me Ishmael. 🐋\n", "Some\nyears ago \n"]),
    ],
    ids=["brackets", "thinking", "plain"],
)
def test_what_is_trained_on_with_other_templates(tokenizer, template, expected):
    assert trained_text(tokenizer, TURNS, template) == expected


def test_a_token_across_the_edge_of_a_turn_is_not_trained_on_and_counted(tokenizer):
    assert len(tokenizer.encode("\n\n\nSome")) == 1 + len(tokenizer.encode("\nSome"))  # two line breaks are one token
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "\n\nSome"}]
    encoded = one(tokenizer, messages, UNTAGGED)
    assert encoded.straddling == 1
    assert trained_text(tokenizer, messages, UNTAGGED) == ["\nSome<|im_end|>"]
    data = chat([messages], tokenizer, length=64, batch=1, template=UNTAGGED)
    assert "1 token across a turn's edge not trained on" in repr(data)


def test_offsets_without_leading_spaces_change_nothing(tokenizer):
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trimmed = Tokenizer(backend, {"eos_token": "<|endoftext|>", "bos_token": "<s>"})
    for template in (DEFAULT_TEMPLATE, BRACKETS, PLAIN):
        assert one(trimmed, TURNS, template).trained_T.tolist() == one(tokenizer, TURNS, template).trained_T.tolist()


def test_the_date_json_and_loop_controls_of_templates(tokenizer):
    call = [{"function": {"name": "look", "arguments": {"at": "söa", "n": 1}}}]
    messages = [SYSTEM, TURNS[0], {"role": "assistant", "content": None, "tool_calls": call}]
    text, _ = render(TOOLS, normalise(messages, "it"), tokenizer.special, "it")
    assert text == (
        "26 Jul 2024user:Who are you? — tell<|im_end|>"
        'assistant:[{"function": {"name": "look", "arguments": {"at": "söa", "n": 1}}}]<|im_end|>'
    )
    assert trained_text(tokenizer, messages, TOOLS) == [
        '[{"function": {"name": "look", "arguments": {"at": "söa", "n": 1}}}]<|im_end|>'
    ]


def test_the_tokenizers_own_template_is_used_and_template_comes_before_it(tokenizer):
    own = Tokenizer(tokenizer.backend, {"eos_token": "<|endoftext|>", "bos_token": "<s>", "chat_template": PLAIN})
    first = encode([("it", TURNS)], own)[0].ids_T.tolist()
    assert first == one(tokenizer, TURNS, PLAIN).ids_T.tolist()
    assert encode([("it", TURNS)], own, UNTAGGED)[0].ids_T.tolist() == one(tokenizer, TURNS, UNTAGGED).ids_T.tolist()
    assert (
        encode([("it", TURNS)], tokenizer)[0].ids_T.tolist() == one(tokenizer, TURNS, DEFAULT_TEMPLATE).ids_T.tolist()
    )


# Shapes of messages ----------------------------------------------------------------------------------------------------


def test_sharegpt_and_parts_and_missing_values_become_plain_messages():
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "system", "value": "c"}]
    assert [(m["role"], m["content"]) for m in normalise(sharegpt, "it")] == [
        ("user", "a"),
        ("assistant", "b"),
        ("system", "c"),
    ]
    parts = [{"role": "User", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}]
    assert normalise(parts, "it") == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    "value",
    [
        "text",
        [],
        None,
        ["text"],
        [{"role": "asistant", "content": "a"}],
        [{"content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
    ],
)
def test_what_is_not_a_conversation(value):
    with refused(ValueError):
        normalise(value, "it")


def test_errors_name_the_conversation(tokenizer, tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 2)
    with file.open("a") as lines:
        lines.write('{"messages": [{"role": "user", "content": "a"}]}\n')
    with refused(ValueError):
        chat(file, tokenizer, 32, 1)
    assert chat(file, tokenizer, 32, 1, train_on="all").tokens > 0


# Templates that cannot be used -----------------------------------------------------------------------------------------


def test_a_template_that_refuses_says_why(tokenizer):
    with refused(ValueError):
        one(tokenizer, [SYSTEM, *TURNS], BRACKETS)
    with refused(ValueError):
        one(tokenizer, TURNS, "{% for %}")
    with pytest.raises(ValueError, match="refuses it"):
        one(tokenizer, TURNS, "{{ messages[9]['content'] }}")


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    counting = "{{ messages | length }}" + PLAIN  # every prefix opens differently
    with refused(ValueError):
        one(tokenizer, TURNS, counting)
    assert one(tokenizer, TURNS, counting, train_on="all").trained_T.all()


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_run_in_a_sandbox(tokenizer, attack):
    with pytest.raises(ValueError, match="the chat template refuses"):
        render(attack, TURNS, tokenizer.special, "it")
    assert len(TURNS) == 4
