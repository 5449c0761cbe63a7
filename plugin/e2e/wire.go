package e2e

import (
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// fields contains the strings of a protobuf message by field number.
type fields map[protowire.Number]string

// wire is a gRPC codec that leaves messages encoded, so that the tests need no generated code.
type wire struct{}

func (wire) Name() string                       { return "proto" }
func (wire) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (wire) Unmarshal(data []byte, v any) error { *v.(*[]byte) = slices.Clone(data); return nil }

// parse returns the strings of an encoded message, and skips all other fields.
func parse(data []byte) (fields, error) {
	f := fields{}
	for len(data) > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		data = data[n:]
		if n = protowire.ConsumeFieldValue(number, kind, data); n < 0 {
			return nil, protowire.ParseError(n)
		}
		if kind == protowire.BytesType {
			text, _ := protowire.ConsumeBytes(data)
			f[number] = string(text)
		}
		data = data[n:]
	}
	return f, nil
}

// reply returns an encoded AddNetworkReply or DelNetworkReply with one address on the second ENI.
// In both messages, field 1 is Success, and field 2 is an IPAllocationMetadata.
func reply(address string) []byte {
	const secondENI, itsTable = 1, 2
	allocation := protowire.AppendTag(nil, 1, protowire.BytesType)
	allocation = protowire.AppendString(allocation, address)
	for number, value := range []uint64{3: secondENI, 4: itsTable} {
		if value != 0 {
			allocation = protowire.AppendTag(allocation, protowire.Number(number), protowire.VarintType)
			allocation = protowire.AppendVarint(allocation, value)
		}
	}
	out := protowire.AppendTag(nil, 1, protowire.VarintType)
	out = protowire.AppendVarint(out, 1)
	out = protowire.AppendTag(out, 2, protowire.BytesType)
	return protowire.AppendBytes(out, allocation)
}
