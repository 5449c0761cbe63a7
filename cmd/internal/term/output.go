package term

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"
)

// Format is the format of a command's results: the value of -o.
type Format string

const (
	Plain Format = "table" // fits the terminal
	Wide  Format = "wide"  // all columns, nothing cut
	JSON  Format = "json"
	Name  Format = "name" // arguments for unwindctl show, one per line
	Line  Format = "line" // the worst finding, or a summary, in one line
)

// Output holds the format that the flags -o and --json select.
type Output struct {
	Format  Format
	allowed []string
}

// AddFlags adds -o and --json. keys lists the keys of the JSON object.
func (o *Output) AddFlags(cmd *cobra.Command, flags *pflag.FlagSet, keys string,
	formats ...Format) {
	o.Format = Plain
	for _, f := range formats {
		o.allowed = append(o.allowed, string(f))
	}
	flags.VarP(o, "output", "o", "output `FORMAT`: "+strings.Join(o.allowed, ", "))
	help := "same as -o json, which prints an object with these keys: version, " + keys
	flags.BoolFunc("json", help, func(value string) error {
		asJSON, err := strconv.ParseBool(value)
		if asJSON {
			o.Format = JSON
		}
		return err
	})
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(o.allowed,
		cobra.ShellCompDirectiveNoFileComp))
}

func (o *Output) String() string { return string(o.Format) }

func (*Output) Type() string { return "FORMAT" }

func (o *Output) Set(value string) error {
	o.Format = Format(value)
	return OneOf(value, o.allowed)
}

// OneOf returns an error if a flag's value is not allowed.
func OneOf(value string, allowed []string) error {
	if !slices.Contains(allowed, value) {
		return fmt.Errorf("must be one of %s", strings.Join(allowed, ", "))
	}
	return nil
}

// IsObject reports whether the format is JSON. The caller then prints its results with PrintObject.
func (o *Output) IsObject() bool { return o.Format == JSON }

// formatVersion is the version of the object that -o json prints, under the key "version". Releases
// with the same format version may add keys, but don't remove a key or change its meaning.
const formatVersion = 1

// PrintObject prints an object of keys and values as JSON. It escapes control characters.
func (o *Output) PrintObject(out io.Writer, key string, value any, more ...any) error {
	object := map[string]any{"version": formatVersion, key: value}
	for i := 0; i+1 < len(more); i += 2 {
		object[fmt.Sprint(more[i])] = more[i+1]
	}
	data, err := json.MarshalIndent(object, "", "  ")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, escape(string(data)))
	return err
}

// escape escapes the non-printable characters of a JSON text, which occur only inside its strings.
func escape(text string) string {
	var escaped strings.Builder
	for _, r := range text { // bytes that are not UTF-8 become U+FFFD
		if r == '\n' || unicode.IsPrint(r) {
			escaped.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&escaped, `\u%04x`, unit)
		}
	}
	return escaped.String()
}

const watchEach = 2 * time.Second

// AddWatch adds --watch to a read-only command, and returns the command. With --watch, the command
// repeats until it is interrupted or returns a usage error. It clears the terminal each time.
func AddWatch(cmd *cobra.Command) *cobra.Command {
	var watch bool
	cmd.Flags().BoolVarP(&watch, "watch", "w", false,
		"repeat every two seconds until interrupted")
	look := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !watch {
			return look(cmd, args)
		}
		out := cmd.OutOrStdout()
		for {
			if f, ok := out.(descriptor); ok {
				if _, terminal := OnTerminal(out); terminal {
					cmd.SetOut(&screen{descriptor: f, out: out})
				}
			}
			err := look(cmd, args)
			var usage UsageError
			switch {
			case errors.As(err, &usage):
				return err
			case cmd.Context().Err() == nil:
				printError(cmd.Root(), err, "")
			}
			select {
			case <-cmd.Context().Done():
				return nil
			case <-time.After(watchEach):
			}
		}
	}
	return cmd
}

// screen writes to a terminal, which it clears before the first write.
type screen struct {
	descriptor
	out     io.Writer
	cleared bool
}

func (s *screen) Write(p []byte) (int, error) {
	if !s.cleared {
		s.cleared = true
		_, _ = io.WriteString(s.out, "\x1b[H\x1b[2J")
	}
	return s.out.Write(p)
}

type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// descriptor is a file, or a writer that writes to one.
type descriptor interface{ Fd() uintptr }

// OnTerminal reports whether to use colors (https://no-color.org), and whether the output is a
// terminal.
func OnTerminal(out io.Writer) (colours, terminal bool) {
	f, ok := out.(descriptor)
	terminal = ok && term.IsTerminal(int(f.Fd()))
	return terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb", terminal
}

// Width returns the width of a terminal in columns, or 0 if the output is not a terminal.
func Width(out io.Writer) int {
	f, ok := out.(descriptor)
	if !ok {
		return 0
	}
	width, _, _ := term.GetSize(int(f.Fd()))
	return width
}
