package wrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/plugin/netconf"
)

type object struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct{ Name, Namespace string }
	Spec       struct{ Config any }
}

const definitionKind = "NetworkAttachmentDefinition"

func (o object) String() string {
	return o.Kind + " " + path.Join(o.Metadata.Namespace, o.Metadata.Name)
}

func (o object) isList() bool { return o.Kind == "List" || o.Kind == definitionKind+"List" }

func (o object) isDefinition() bool {
	return o.Kind == definitionKind && strings.HasPrefix(o.APIVersion, "k8s.cni.cncf.io/")
}

// manifest rewrites Kubernetes objects in YAML or JSON. It changes spec.config of
// NetworkAttachmentDefinitions, and leaves everything else unchanged: JSON byte for byte, YAML with
// its order and comments.
type manifest struct {
	change  func(object) (config string, err error) // returns "" if there is nothing to change
	objects int                                     // of any kind
	found   int                                     // NetworkAttachmentDefinitions
	changed bool
}

// rewrite applies m.change to every NetworkAttachmentDefinition in YAML or JSON text, and counts
// the objects. It returns nil if the text contains no object.
func (m *manifest) rewrite(data []byte) ([]byte, error) {
	if json.Valid(data) {
		return m.json(data)
	}
	var documents [][]byte
	for dec := yaml.NewDecoder(bytes.NewReader(data)); ; {
		var document yaml.Node
		err := dec.Decode(&document)
		if errors.Is(err, io.EOF) {
			return bytes.Join(documents, []byte("---\n")), nil
		}
		if err != nil {
			return nil, fmt.Errorf("not valid YAML: %w", err)
		}
		if err := m.yaml(&document); err != nil {
			return nil, err
		}
		text, err := encode(&document)
		if err != nil {
			return nil, err
		}
		documents = append(documents, text)
	}
}

// encode returns the text of a document. It returns an error if reading that text gives another
// document, because the YAML library cannot read everything that it writes.
func encode(document *yaml.Node) ([]byte, error) {
	out, err := term.EncodeYAML(document)
	var was, is any
	if err = errors.Join(err, document.Decode(&was)); err != nil {
		return nil, err
	}
	if yaml.Unmarshal(out, &is) != nil || !reflect.DeepEqual(was, is) {
		return nil, term.WithHint("use JSON (kubectl get -o json)",
			"cannot rewrite this YAML without changing other parts of it")
	}
	return out, nil
}

func (m *manifest) json(text jsonText) (jsonText, error) {
	var o object
	err := json.Unmarshal(text, &o)
	if !m.count(o) {
		return text, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o, err)
	}
	members, err := text.parts(0)
	if err != nil {
		return nil, err
	}
	if o.isList() {
		items, _ := member(members, "items")
		if len(items.raw) == 0 || items.raw[0] != '[' {
			return text, nil
		}
		elements, err := text.parts(items.value)
		if err != nil {
			return nil, err
		}
		var out jsonText
		done := 0
		for _, e := range elements {
			item, err := m.json(jsonText(e.raw))
			if err != nil {
				return nil, err
			}
			out, done = append(append(out, text[done:e.value]...), item...), e.end
		}
		return append(out, text[done:]...), nil
	}
	config, err := m.config(o)
	if config == "" || err != nil {
		return text, err
	}
	spec, _ := member(members, "spec")
	if members, err = text.parts(spec.value); err != nil {
		return nil, err
	}
	c, ok := member(members, "config")
	if !ok {
		return nil, fmt.Errorf(`%s: the key must be spelled exactly "spec.config"`, o)
	}
	return text.cut(c.value, c.end).insert(c.value, netconf.Marshal(config)...), nil
}

func (m *manifest) yaml(n *yaml.Node) error {
	if n.Kind == yaml.DocumentNode {
		n = n.Content[0]
	}
	var o object
	err := n.Decode(&o)
	if !m.count(o) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", o, err)
	}
	if o.isList() {
		for _, item := range child(n, "items").Content {
			if err := m.yaml(item); err != nil {
				return err
			}
		}
		return nil
	}
	config, err := m.config(o)
	if config == "" || err != nil {
		return err
	}
	c := child(child(n, "spec"), "config")
	if c.Kind != yaml.ScalarNode || c.Anchor != "" {
		return fmt.Errorf(`%s: key "spec.config" has an anchor or an alias; write the value itself`, o)
	}
	c.Style = 0
	c.SetString(config)
	return nil
}

// child returns the value of a key in a mapping, or an empty node.
func child(n *yaml.Node, key string) *yaml.Node {
	for i := 0; n.Kind == yaml.MappingNode && i < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return &yaml.Node{}
}

// count counts an object, and reports whether it may contain something to change.
func (m *manifest) count(o object) bool {
	if o.APIVersion != "" && o.Kind != "" {
		m.objects++
	}
	if o.isDefinition() {
		m.found++
	}
	return o.isDefinition() || o.isList()
}

func (m *manifest) config(o object) (string, error) {
	config, err := m.change(o)
	if err != nil {
		return "", fmt.Errorf("%s: %w", o, err)
	}
	m.changed = m.changed || config != ""
	return config, nil
}
