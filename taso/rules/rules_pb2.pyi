from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Exactness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACT: _ClassVar[Exactness]
    REASSOCIATES: _ClassVar[Exactness]
    APPROXIMATES: _ClassVar[Exactness]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROVED: _ClassVar[Status]
    BOUNDED: _ClassVar[Status]
    TESTED: _ClassVar[Status]
    UNPROVED: _ClassVar[Status]
    REFUTED: _ClassVar[Status]
EXACT: Exactness
REASSOCIATES: Exactness
APPROXIMATES: Exactness
PROVED: Status
BOUNDED: Status
TESTED: Status
UNPROVED: Status
REFUTED: Status

class Parameter(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: int
    value: int
    def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("opId", "tsId", "variable", "absent")
    OPID_FIELD_NUMBER: _ClassVar[int]
    TSID_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    opId: int
    tsId: int
    variable: str
    absent: bool
    def __init__(self, opId: _Optional[int] = ..., tsId: _Optional[int] = ..., variable: _Optional[str] = ..., absent: bool = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("name", "expression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    expression: str
    def __init__(self, name: _Optional[str] = ..., expression: _Optional[str] = ...) -> None: ...

class Operator(_message.Message):
    __slots__ = ("type", "input", "para", "name", "attribute", "outputs")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    PARA_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    type: int
    input: _containers.RepeatedCompositeFieldContainer[Tensor]
    para: _containers.RepeatedCompositeFieldContainer[Parameter]
    name: str
    attribute: _containers.RepeatedCompositeFieldContainer[Attribute]
    outputs: int
    def __init__(self, type: _Optional[int] = ..., input: _Optional[_Iterable[_Union[Tensor, _Mapping[str, object]]]] = ..., para: _Optional[_Iterable[_Union[Parameter, _Mapping[str, object]]]] = ..., name: _Optional[str] = ..., attribute: _Optional[_Iterable[_Union[Attribute, _Mapping[str, object]]]] = ..., outputs: _Optional[int] = ...) -> None: ...

class MapOutput(_message.Message):
    __slots__ = ("srcOpId", "dstOpId", "srcTsId", "dstTsId", "dstVariable")
    SRCOPID_FIELD_NUMBER: _ClassVar[int]
    DSTOPID_FIELD_NUMBER: _ClassVar[int]
    SRCTSID_FIELD_NUMBER: _ClassVar[int]
    DSTTSID_FIELD_NUMBER: _ClassVar[int]
    DSTVARIABLE_FIELD_NUMBER: _ClassVar[int]
    srcOpId: int
    dstOpId: int
    srcTsId: int
    dstTsId: int
    dstVariable: str
    def __init__(self, srcOpId: _Optional[int] = ..., dstOpId: _Optional[int] = ..., srcTsId: _Optional[int] = ..., dstTsId: _Optional[int] = ..., dstVariable: _Optional[str] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("method", "command", "seed", "trials", "primes", "error_bound", "counterexample", "reason", "digest", "dimensions")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    PRIMES_FIELD_NUMBER: _ClassVar[int]
    ERROR_BOUND_FIELD_NUMBER: _ClassVar[int]
    COUNTEREXAMPLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    method: str
    command: str
    seed: int
    trials: int
    primes: _containers.RepeatedScalarFieldContainer[int]
    error_bound: float
    counterexample: str
    reason: str
    digest: str
    dimensions: int
    def __init__(self, method: _Optional[str] = ..., command: _Optional[str] = ..., seed: _Optional[int] = ..., trials: _Optional[int] = ..., primes: _Optional[_Iterable[int]] = ..., error_bound: _Optional[float] = ..., counterexample: _Optional[str] = ..., reason: _Optional[str] = ..., digest: _Optional[str] = ..., dimensions: _Optional[int] = ...) -> None: ...

class Rule(_message.Message):
    __slots__ = ("srcOp", "dstOp", "mappedOutput", "name", "condition", "exactness", "status", "certificate", "origin", "id")
    SRCOP_FIELD_NUMBER: _ClassVar[int]
    DSTOP_FIELD_NUMBER: _ClassVar[int]
    MAPPEDOUTPUT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    srcOp: _containers.RepeatedCompositeFieldContainer[Operator]
    dstOp: _containers.RepeatedCompositeFieldContainer[Operator]
    mappedOutput: _containers.RepeatedCompositeFieldContainer[MapOutput]
    name: str
    condition: _containers.RepeatedScalarFieldContainer[str]
    exactness: Exactness
    status: Status
    certificate: Certificate
    origin: str
    id: str
    def __init__(self, srcOp: _Optional[_Iterable[_Union[Operator, _Mapping[str, object]]]] = ..., dstOp: _Optional[_Iterable[_Union[Operator, _Mapping[str, object]]]] = ..., mappedOutput: _Optional[_Iterable[_Union[MapOutput, _Mapping[str, object]]]] = ..., name: _Optional[str] = ..., condition: _Optional[_Iterable[str]] = ..., exactness: _Optional[_Union[Exactness, str]] = ..., status: _Optional[_Union[Status, str]] = ..., certificate: _Optional[_Union[Certificate, _Mapping[str, object]]] = ..., origin: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class RuleCollection(_message.Message):
    __slots__ = ("rule", "format_version", "rules")
    RULE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    rule: _containers.RepeatedCompositeFieldContainer[Rule]
    format_version: int
    rules: int
    def __init__(self, rule: _Optional[_Iterable[_Union[Rule, _Mapping[str, object]]]] = ..., format_version: _Optional[int] = ..., rules: _Optional[int] = ...) -> None: ...
