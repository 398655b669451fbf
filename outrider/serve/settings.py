"""Settings of the server. From them come the flags of ``outrider serve``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.errors import SettingError
from outrider.core.settings import check_settings, setting

KEY_VARIABLE = "OUTRIDER_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerSettings:
    """Where to listen, who may come in, and how much is taken on."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network interface")
    port: int = setting(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    served_model_name: str | None = setting(None, "the model's name in the API; default: as it was loaded")
    api_key: tuple[str, ...] = setting((), f"a key that lets clients in (also from {KEY_VARIABLE}); may be repeated")
    api_key_file: str | None = setting(None, "a file with such keys, one a line")
    cors_origin: tuple[str, ...] = setting(
        (), "a web origin that may call the API from a browser, or *; may be repeated"
    )
    max_queue: int = setting(256, "answers that wait for a seat, beside those that run; more get status 429", low=0)
    max_body_mib: float = setting(8, "largest request body, MiB", low=0.001, high=1024)
    request_timeout: float | None = setting(None, "seconds after which a request is ended; default: never", low=0.001)
    client_timeout: float = setting(
        60, "seconds without a byte after which a client that should read or send is given up", low=0.001
    )
    stream_interval: float = setting(
        0.02, "seconds between two pieces of a streamed answer, at least; tokens that come faster go together", low=0
    )
    grace: float = setting(30, "seconds that running requests get on shutdown", low=0)
    per_request_spec_decode_metrics: bool = setting(False, "show in every response what speculation did for it")
    access_log: bool = setting(False, "log a line for each HTTP request")
    log_requests: bool = setting(True, "log a line for each request that ended: numbers, never text")
    log_format: str = setting("text", "how logs are written", choices=("text", "json"))

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("api_key", "cors_origin"):
            values = getattr(self, name)
            if not all(isinstance(value, str) and value for value in values):
                raise SettingError(f"{name} is {values!r}; allowed are texts that are not empty", name)
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self.api_key):
            said = "api_key holds a character that HTTP headers cannot carry; allowed is ASCII without spaces"
            raise SettingError(said, "api_key")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * (1 << 20))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in LOOPBACK

    def with_keys(self, environment: Mapping[str, str] = os.environ) -> ServerSettings:
        """The same settings, with the keys of the file and the environment among ``api_key``."""
        keys = [*self.api_key]
        if environment.get(KEY_VARIABLE):
            keys.append(environment[KEY_VARIABLE])
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingError(f"api_key_file {self.api_key_file} cannot be read: {error}") from None
            own = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not own:
                raise SettingError(f"api_key_file {self.api_key_file} holds no key; expected is one a line")
            keys += own
        return replace(self, api_key=tuple(dict.fromkeys(keys)))
