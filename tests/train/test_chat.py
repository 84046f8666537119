"""A reply of the model in training: rendered as transformers renders it, ended where the turn ends, without a trace in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.data import Batches, Tokenizer
from surokit.data.conversations import prompt_for_reply
from surokit.data.templates import DEFAULT_TEMPLATE
from surokit.texts import SHAKESPEARE
from surokit.train import Session
from tests.refusals import refused
from tests.train.toys import Toy, assert_same_state, make_session

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QUESTION = [{"role": "user", "content": "Who are you?"}]
# In the manner of Mistral: turns have to alternate, and a turn ends with the end-of-text token.
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# In the manner of Llama 3: the text opens with a token, headers, and an end of turn that is not the end of text.
HEADERS = (
    "{%- if tools is not none %}{{- 'tools' }}{%- endif %}{{- bos_token }}{%- for m in messages %}"
    "{{- '<|im_start|>' + m['role'] + '\\n\\n' + m['content'] | trim + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}"
)


def tokenizer(template: str | None = None, special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    backend = sk.train_tokenizer(
        ["Who are you? Call me Ishmael. user assistant system\n" * 3], 300, special=special
    ).backend
    config = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "chat_template": template}
    return Tokenizer(backend, {key: value for key, value in config.items() if value})


def data(words: str = "Ishmael.", tok: Tokenizer | None = None) -> Batches:
    said = [*QUESTION, {"role": "assistant", "content": words}]
    return sk.chat([said] * 4, tok or tokenizer(), length=64, batch=2)


def decoder(**changes: Any) -> sk.Decoder:
    torch.manual_seed(0)
    sizes = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "vocab": 320, "ffn": 48, "max_length": 256}
    return sk.Decoder(sk.DecoderConfig(**{**sizes, **changes}))


@pytest.fixture(scope="module")
def taught() -> Session:
    """A session whose model has learnt one answer by heart."""
    session = make_session(decoder(), data(), schedule=None)
    session.run(60)
    return session


class TestAgainstTransformers:
    @pytest.mark.parametrize("beside", [True, False], ids=["chat_template.jinja", "tokenizer_config.json"])
    @pytest.mark.parametrize("template", [DEFAULT_TEMPLATE, STRICT, HEADERS], ids=["chatml", "strict", "headers"])
    @pytest.mark.parametrize("turns", [1, 3])
    def test_the_prompt_of_a_folder(self, tmp_path: Path, template: str, beside: bool, turns: int) -> None:
        from transformers import AutoTokenizer

        tokenizer(None if beside else template).save(tmp_path)
        if beside:
            (tmp_path / "chat_template.jinja").write_text(template)
        messages = [*QUESTION, {"role": "assistant", "content": " Ishmael.\n"}, {"role": "user", "content": "Why?"}]
        messages = messages[:turns]
        theirs = AutoTokenizer.from_pretrained(str(tmp_path))
        ours = sk.load_tokenizer(tmp_path)
        for opened in (True, False):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
            assert ours.apply_chat_template(messages, add_generation_prompt=opened) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert prompt_for_reply(messages, ours).ids == ids

    def test_a_reply_is_what_their_model_generates(self, taught: Session, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer(DEFAULT_TEMPLATE).save(tmp_path)
        assert isinstance(taught.model, sk.Decoder)
        sk.save(taught.model, tmp_path)
        model, tok = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
        messages = [{"role": "user", "content": "Who?"}]  # not what was learnt by heart
        inputs = tok.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=[0, 2], pad_token_id=0)
        expected = tok.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        assert taught.chat(messages, 24) == expected


class TestReplies:
    def test_what_was_learnt_is_said_and_ended(self, taught: Session) -> None:
        assert taught.chat(QUESTION) == taught.chat("Who are you?") == "Ishmael."
        assert "Ishmael.<|im_end|>" in taught.sample(
            "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_an_end_of_turn_that_is_no_token_is_cut_off(self) -> None:
        plain = tokenizer(special=("<|endoftext|>",))
        assert len(plain.encode("<|im_end|>")) > 1
        session = make_session(decoder(), data(tok=plain), schedule=None)
        session.run(60)
        assert session.chat(QUESTION, 40) == "Ishmael."

    @pytest.mark.parametrize(
        ("template", "words", "reply"),
        [
            (DEFAULT_TEMPLATE, "Ishmael.<|im_end|>\n<|im_start|>user\nWho", "Ishmael."),
            (DEFAULT_TEMPLATE, "Ishmael.<|endoftext|>Who", "Ishmael."),
            (DEFAULT_TEMPLATE, "Call me\nIshmael", "Call me\nIshmael"),
            (STRICT, " Ishmael.<|endoftext|>[INST] Who", "Ishmael."),
            (HEADERS, "Ishmael.<|im_end|><|im_start|>user", "Ishmael."),
            (
                "{% for m in messages %}{{ m.role + ': ' + m.content + '\n###\n' }}{% endfor %}",
                "I.\nAm\n###\nuser",
                "I.\nAm",
            ),
            ("{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}", "I.\nAm\n", "I.\nAm"),
        ],
    )
    def test_where_a_turn_ends(self, template: str, words: str, reply: str) -> None:
        tok = tokenizer(template)
        prompt = prompt_for_reply(QUESTION, tok)
        assert prompt.reply(tok.encode(words), tok) == reply

    def test_an_end_of_turn_that_is_a_token_but_not_a_special_one(self) -> None:
        plain = tokenizer(DEFAULT_TEMPLATE, special=("<|endoftext|>",))
        plain.backend.add_tokens(["<|im_end|>"])
        mark = plain.backend.token_to_id("<|im_end|>")
        prompt = prompt_for_reply(QUESTION, plain)
        assert plain.eos_id is not None
        assert mark is not None
        assert prompt.end_ids == (plain.eos_id, mark)
        assert prompt.reply([*plain.encode("Ishmael."), mark], plain) == "Ishmael."

    def test_the_models_own_end_tokens_end_it_too(self, taught: Session) -> None:
        first = taught.data.tokenizer.encode("Ishmael.")[0]
        twin = make_session(decoder(eos_id=first), data())
        twin.model.load_state_dict(taught.model.state_dict())
        assert len(twin.chat(QUESTION)) < len(taught.chat(QUESTION))

    def test_temperature_and_seed(self) -> None:
        session = make_session(decoder(), data())
        replies = [session.chat(QUESTION, 12, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
        assert replies[0] == replies[1] != replies[2]

    @pytest.mark.parametrize("recipe", [sk.BF16, sk.FP8, sk.QNF4.lora(rank=2), sk.QFP8.lora(rank=2)], ids=str)
    def test_replies_leave_the_run_as_it_was(self, recipe: sk.Recipe) -> None:
        one, other = (make_session(decoder().bfloat16(), data(), recipe=recipe) for _ in range(2))
        for _ in range(2):
            one.run(2)
            other.run(2)
            assert isinstance(one.chat(QUESTION, 8), str)
            one.sample("Who", 4)
        assert_same_state(one, other)
        assert one.model.training


class TestTemplatesAndTokenizers:
    def test_the_datas_own_template_comes_before_the_tokenizers(self, taught: Session) -> None:
        strict = tokenizer(STRICT)
        said = [*QUESTION, {"role": "assistant", "content": "Ishmael."}]
        batches = sk.chat([said] * 4, strict, length=64, batch=2, template=DEFAULT_TEMPLATE)
        assert batches.chat_template == DEFAULT_TEMPLATE
        session = make_session(decoder(), batches)
        session.model.load_state_dict(taught.model.state_dict())
        assert session.chat(QUESTION) == "Ishmael."
        system = [{"role": "system", "content": "a"}, *QUESTION]
        assert isinstance(session.chat(system, 4), str)
        with refused(ValueError):
            session.chat(system, 4, template=STRICT)
        with refused(ValueError):
            session.chat(system, 4, tokenizer=strict)

    def test_data_of_another_kind_with_a_tokenizer_that_is_given(self, taught: Session, tmp_path: Path) -> None:
        tokenizer(DEFAULT_TEMPLATE).save(tmp_path)
        session = make_session(decoder(), list(data()))
        session.model.load_state_dict(taught.model.state_dict())
        for given in (tmp_path, str(tmp_path), sk.load_tokenizer(tmp_path)):
            assert session.chat(QUESTION, tokenizer=given) == "Ishmael."
        assert session.sample("Who", 4, tokenizer=tmp_path) == taught.sample("Who", 4)
        assert session.chat(QUESTION, tokenizer=tokenizer(), template=DEFAULT_TEMPLATE) == "Ishmael."

    def test_text_with_a_tokenizer_that_has_a_template(self) -> None:
        batches = sk.text(["Who are you? " * 40], tokenizer(HEADERS), length=8, batch=2)
        assert isinstance(make_session(decoder(), batches).chat(QUESTION, 4), str)


class TestRefusals:
    def test_no_tokenizer(self) -> None:
        session = make_session(decoder(), list(data()))
        with refused(ValueError):
            session.chat(QUESTION)

    def test_no_template(self) -> None:
        session = make_session(decoder(), sk.text(["Who are you? " * 40], tokenizer(), length=8, batch=2))
        with refused(ValueError):
            session.chat(QUESTION)

    @pytest.mark.parametrize(
        "messages",
        [
            [],
            [{"role": "usr", "content": "a"}],
            [*QUESTION, {"role": "assistant", "content": "a"}],
            [*QUESTION, *QUESTION],
            [{"role": "system", "content": "a"}, *QUESTION],
        ],
    )
    def test_roles_out_of_order(self, messages: list[dict[str, str]]) -> None:
        session = make_session(decoder(), data(tok=tokenizer(STRICT)))
        with refused(ValueError):
            session.chat(messages)

    def test_a_tokenizer_larger_than_the_model(self) -> None:
        session = make_session(decoder(), data())
        larger = sk.train_tokenizer(SHAKESPEARE, 400, special=SPECIAL)
        with refused(ValueError):
            session.chat(QUESTION, tokenizer=larger)

    def test_a_model_without_a_cache_of_ours(self) -> None:
        toy = Toy()
        toy.embed = nn.Embedding(320, 16)
        with refused(TypeError):
            make_session(toy).chat(QUESTION, tokenizer=tokenizer(DEFAULT_TEMPLATE))

    def test_more_than_the_model_has_room_for(self) -> None:
        session = make_session(decoder(max_length=64), data())
        with refused(ValueError):
            session.chat(QUESTION, max_new_tokens=128)

    def test_whoever_names_no_number_gets_what_there_is_room_for(self) -> None:
        roomy, narrow = (make_session(decoder(max_length=length), data()) for length in (512, 64))
        narrow.model.load_state_dict(roomy.model.state_dict())
        assert roomy.chat(QUESTION) == roomy.chat(QUESTION, max_new_tokens=128)
        assert roomy.chat(QUESTION).startswith(narrow.chat(QUESTION))
        assert narrow.sample("a") == roomy.sample("a", max_new_tokens=63)
        assert roomy.sample("a") == roomy.sample("a", max_new_tokens=64)
        with refused(ValueError):
            narrow.sample("a" * 64)
