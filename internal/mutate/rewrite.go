package mutate

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"slices"
	"strings"
)

// rewriter visits one file and notes what to insert where. Outer nodes come before inner ones.
type rewriter struct {
	*source
	file          *token.File
	text          []byte // as it is
	out           []byte // as it will be, but for the insertions
	fn            string
	opens, closes map[int][]string // by offset
}

// insert puts before in front of from and after behind to.
func (w *rewriter) insert(from, to token.Pos, before, after string) {
	a, b := w.file.Offset(from), w.file.Offset(to)
	if before != "" {
		w.opens[a] = append(w.opens[a], before)
	}
	if after != "" {
		w.closes[b] = slices.Insert(w.closes[b], 0, after)
	}
}

func (w *rewriter) render() []byte {
	var out bytes.Buffer
	for i := 0; i <= len(w.out); i++ {
		for _, s := range w.closes[i] {
			out.WriteString(s)
		}
		for _, s := range w.opens[i] {
			out.WriteString(s)
		}
		if i < len(w.out) {
			out.WriteByte(w.out[i])
		}
	}
	return out.Bytes()
}

// is a piece of the source on one line.
func (w *rewriter) show(n ast.Node) string {
	s := string(w.text[w.file.Offset(n.Pos()):w.file.Offset(n.End())])
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > 60 {
		s = string(r[:60]) + "…"
	}
	return s
}

// mutant adds one and returns its number.
func (w *rewriter) mutant(at ast.Node, class, format string, args ...any) int {
	pos := w.fset.Position(at.Pos())
	line := w.text[w.file.Offset(w.file.LineStart(pos.Line)):]
	if i := bytes.IndexByte(line, '\n'); i >= 0 {
		line = line[:i]
	}
	code, _, _ := strings.Cut(string(line), " //")
	m := &Mutant{ID: len(w.mutants) + 1, Pos: pos, Func: w.fn, Line: strings.TrimSpace(code), Class: class, Change: fmt.Sprintf(format, args...)}
	key := m.Key()
	w.seen[key]++
	m.Nth = w.seen[key]
	w.mutants = append(w.mutants, m)
	return m.ID
}

// Visit implements ast.Visitor.
func (w *rewriter) Visit(n ast.Node) ast.Visitor {
	switch n := n.(type) {
	case *ast.BlockStmt:
		w.statements(n.List)
	case *ast.IfStmt:
		w.block(n.Body, "body of if")
		if e, ok := n.Else.(*ast.BlockStmt); ok {
			w.block(e, "else")
		}
	case *ast.CaseClause:
		w.clause(n)
		w.statements(n.Body)
	case *ast.AssignStmt:
		w.assign(n)
		for _, x := range n.Rhs {
			ast.Walk(w, x)
		}
		return nil // the left side is no value
	case *ast.IncDecStmt:
		return nil
	case *ast.FuncLit:
		w.results(n.Type, n.Body)
	case *ast.KeyValueExpr:
		w.keyValue(n)
		ast.Walk(w, n.Value)
		return nil // a key is no expression
	case *ast.SelectorExpr:
		if w.boolean(n) {
			w.negate(n)
		}
		ast.Walk(w, n.X)
		return nil
	case *ast.ArrayType, *ast.FuncType, *ast.GenDecl:
		return nil
	case *ast.CompositeLit:
		for _, e := range n.Elts {
			ast.Walk(w, e)
		}
		return nil
	case *ast.BinaryExpr:
		w.binary(n)
	case *ast.UnaryExpr:
		if n.Op == token.AND {
			return nil // what has its address taken is no value
		}
	case *ast.CallExpr:
		if w.boolean(n) {
			w.negate(n)
		}
	case *ast.Ident:
		w.ident(n)
	case *ast.BasicLit:
		w.literal(n)
	}
	return w
}

// results makes a function compile that loses its return.
func (w *rewriter) results(t *ast.FuncType, body *ast.BlockStmt) {
	if t.Results == nil {
		return
	}
	var zeros []string
	for _, field := range t.Results.List {
		for range max(1, len(field.Names)) {
			zeros = append(zeros, "*new("+types.ExprString(field.Type)+")")
		}
	}
	w.insert(body.Rbrace, body.Rbrace, "; return "+strings.Join(zeros, ", ")+" ", "")
}

// typeOf is how the type of x is written in its package.
func (w *rewriter) typeOf(x ast.Expr) string {
	return types.TypeString(types.Default(w.info.Types[x].Type), types.RelativeTo(w.pkg))
}

// statements drops each statement that can go.
func (w *rewriter) statements(list []ast.Stmt) {
	for _, st := range list {
		switch st := st.(type) {
		case *ast.ExprStmt, *ast.IncDecStmt, *ast.BranchStmt, *ast.ReturnStmt, *ast.IfStmt, *ast.SwitchStmt:
			if b, ok := st.(*ast.BranchStmt); ok && b.Tok == token.FALLTHROUGH {
				continue
			}
			if _, ok := st.(*ast.IfStmt); ok { // its body and its condition are mutants of their own
				continue
			}
			w.drop(st)
		case *ast.AssignStmt:
			if st.Tok != token.DEFINE {
				w.drop(st)
			}
		}
	}
}

func (w *rewriter) drop(st ast.Stmt) {
	id := w.mutant(st, "drop statement", "drop %s", w.show(st))
	w.insert(st.Pos(), st.End(), fmt.Sprintf("if !mutantIs(%d) { ", id), " }")
}

// block empties a block of more than one statement; with one it would repeat the drop.
func (w *rewriter) block(b *ast.BlockStmt, what string) {
	if len(b.List) < 2 {
		return
	}
	id := w.mutant(b, "drop branch", "drop %s %s", what, w.show(b))
	w.insert(b.Lbrace+1, b.Rbrace, fmt.Sprintf(" if !mutantIs(%d) {", id), "}")
}

// clause empties a case.
func (w *rewriter) clause(c *ast.CaseClause) {
	if len(c.Body) == 0 {
		return
	}
	last := c.Body[len(c.Body)-1]
	if b, ok := last.(*ast.BranchStmt); ok && b.Tok == token.FALLTHROUGH {
		return
	}
	if len(c.Body) == 1 {
		if _, ok := last.(*ast.IfStmt); !ok {
			return // the drop of the statement
		}
	}
	id := w.mutant(c, "drop case", "drop body")
	w.insert(c.Colon+1, last.End(), fmt.Sprintf(" if !mutantIs(%d) {\n", id), "\n}")
}

// assign keeps one of several left sides as it was; a statement with one is dropped as such.
func (w *rewriter) assign(a *ast.AssignStmt) {
	if a.Tok != token.ASSIGN || len(a.Lhs) < 2 || len(a.Lhs) != len(a.Rhs) {
		return
	}
	for i, rhs := range a.Rhs {
		old := w.plain(a.Lhs[i])
		id := w.mutant(a, "drop assignment", "drop %s = %s", old, w.show(rhs))
		w.insert(rhs.Pos(), rhs.End(), fmt.Sprintf("mutantPick[%s](%d, %s, ", w.typeOf(a.Lhs[i]), id, old), ")")
	}
}

func (w *rewriter) plain(x ast.Expr) string { return types.ExprString(x) }

// keyValue leaves a field of a literal out.
func (w *rewriter) keyValue(kv *ast.KeyValueExpr) {
	id := w.mutant(kv, "drop field", "drop %s", w.show(kv))
	w.insert(kv.Value.Pos(), kv.Value.End(), fmt.Sprintf("mutantZero[%s](%d, ", w.typeOf(kv.Value), id), ")")
}

func (w *rewriter) boolean(x ast.Expr) bool {
	t := w.info.Types[x].Type
	if t == nil || w.info.Types[x].IsType() {
		return false
	}
	b, ok := t.Underlying().(*types.Basic)
	return ok && b.Info()&types.IsBoolean != 0
}

func (w *rewriter) negate(x ast.Expr) {
	id := w.mutant(x, "negate", "not (%s)", w.show(x))
	w.insert(x.Pos(), x.End(), "((", fmt.Sprintf(") != mutantIs(%d))", id))
}

func (w *rewriter) binary(x *ast.BinaryExpr) {
	switch x.Op {
	case token.LAND, token.LOR:
		is, other, call, forced := "&&", "||", "mutantAnd", "true"
		if x.Op == token.LOR {
			is, other, call, forced = "||", "&&", "mutantOr", "false"
		}
		swap := w.mutant(x, "swap && and ||", "%s → %s in %s", is, other, w.show(x))
		for i, operand := range []ast.Expr{x.X, x.Y} {
			id := w.mutant(operand, "force operand", "%s → %s in %s", w.show(operand), forced, w.show(x))
			before, after := "(", fmt.Sprintf(" || mutantIs(%d))", id)
			if x.Op == token.LOR {
				before, after = "(", fmt.Sprintf(" && !mutantIs(%d))", id)
			}
			if _, ok := operand.(*ast.BinaryExpr); ok {
				before, after = "(("+"", ")"+after
			}
			if i == 0 { // "call(id, X, func() bool { return Y })"
				before = fmt.Sprintf("%s(%d, ", call, swap) + before
			} else {
				before, after = " func() bool { return "+before, after+" })"
			}
			w.insert(operand.Pos(), operand.End(), before, after)
		}
		// The operator itself becomes the comma between the arguments.
		at := w.file.Offset(x.OpPos)
		w.out[at], w.out[at+1] = ',', ' '
	case token.EQL, token.NEQ:
		w.negate(x)
	case token.LSS, token.LEQ, token.GTR, token.GEQ:
		w.negate(x)
		edge := map[token.Token]token.Token{token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR}[x.Op]
		id := w.mutant(x, "move bound", "%s → %s in %s", x.Op, edge, w.show(x))
		w.insert(x.Pos(), x.End(), fmt.Sprintf("mutantPick(%d, %s %s %s, ", id, w.plain(x.X), edge, w.plain(x.Y)), ")")
	}
}

// ident replaces a constant of a named type by its neighbours in value, and true by false.
func (w *rewriter) ident(x *ast.Ident) {
	switch obj := w.info.Uses[x].(type) {
	case *types.Const:
		if obj.Parent() == types.Universe {
			if w.boolean(x) {
				w.negate(x)
			}
			return
		}
		list := w.consts[obj.Type()]
		i := slices.Index(list, obj)
		if i < 0 || len(list) < 2 {
			return
		}
		others := []*types.Const{list[(i+1)%len(list)]}
		if len(list) > 2 {
			others = append(others, list[(i+len(list)-1)%len(list)])
		}
		for _, other := range others {
			id := w.mutant(x, "replace constant", "%s → %s", obj.Name(), other.Name())
			w.insert(x.Pos(), x.End(), fmt.Sprintf("mutantPick[%s](%d, %s, ", w.typeOf(x), id, other.Name()), ")")
		}
	case *types.Var:
		if w.boolean(x) {
			w.negate(x)
		}
	}
}

// literal adds one to an integer.
func (w *rewriter) literal(x *ast.BasicLit) {
	t := w.info.Types[x].Type
	if x.Kind != token.INT || t == nil {
		return
	}
	id := w.mutant(x, "replace constant", "%s → %s+1", x.Value, x.Value)
	w.insert(x.Pos(), x.End(), fmt.Sprintf("mutantPick[%s](%d, %s+1, ", w.typeOf(x), id, x.Value), ")")
}
